"""Local transformers tokenizers, and the ByT5 one that stands for plain bytes in a checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, ByT5Tokenizer

from usp.data.tokenizer import BYTES, ByteTokenizer, TextTokenizer, Tokenizer


def load_tokenizer(tokenizer: str) -> Tokenizer:
    """The byte tokenizer, or the one that `tokenizer`, a local folder, holds; ValueError where it holds none."""
    if tokenizer == BYTES:
        return ByteTokenizer()
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer={tokenizer} is no folder: give one with a transformers tokenizer, or {BYTES!r}")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"tokenizer={tokenizer}: transformers cannot read it: {error}") from error
    return TextTokenizer(tokenizer, max(loaded.get_vocab().values()) + 1, loaded)


def save_tokenizer(tokenizer: Tokenizer, checkpoint: Path) -> None:
    """Write the tokenizer for `AutoTokenizer.from_pretrained`: a transformers one into `checkpoint`, bytes beside it.

    Bytes go to the folder `tokenizer` next to the checkpoint, because for some model types AutoTokenizer looks at
    the config.json it finds and takes that family's class instead of ByT5's.
    """
    if isinstance(tokenizer, TextTokenizer):
        tokenizer.tokenizer.save_pretrained(checkpoint)
    else:
        ByT5Tokenizer().save_pretrained(checkpoint.parent / "tokenizer")
