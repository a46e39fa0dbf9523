"""Local transformers tokenizers, and ByT5's tokenizer as the saved form of the byte tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, ByT5Tokenizer

from usp.data.tokenizer import BYTES, ByteTokenizer, TextTokenizer, Tokenizer


def load_tokenizer(tokenizer: str) -> Tokenizer:
    """Return the byte tokenizer, or load one from the local directory `tokenizer`; raises ValueError if it has none."""
    if tokenizer == BYTES:
        return ByteTokenizer()
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer={tokenizer} is not a directory: use a transformers tokenizer's, or {BYTES!r}")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"tokenizer={tokenizer}: transformers cannot read it: {error}") from error
    return TextTokenizer(tokenizer, max(loaded.get_vocab().values()) + 1, loaded)


def save_tokenizer(tokenizer: Tokenizer, checkpoint: Path) -> None:
    """Save the tokenizer for `AutoTokenizer.from_pretrained`: a transformers one in `checkpoint`, bytes next to it.

    The byte tokenizer goes to the sibling directory `tokenizer`: for some model types AutoTokenizer would read the
    config.json in `checkpoint` and load that family's tokenizer class instead of ByT5's.
    """
    if isinstance(tokenizer, TextTokenizer):
        tokenizer.tokenizer.save_pretrained(checkpoint)
    else:
        ByT5Tokenizer().save_pretrained(checkpoint.parent / "tokenizer")
