"""Local transformers tokenizers, and ByT5's tokenizer as the saved form of the byte tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ByT5Tokenizer, TokenizersBackend

from usp.data.tokenizer import BYTES, ByteTokenizer, TextTokenizer, Tokenizer
from usp.presets import PRESETS

from .chat.template import ChatTemplate

AUTO = "auto"
# A directory with one of these holds a tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
BESIDE = "tokenizer"  # directory beside a model with the byte tokenizer


def tokenizer_of(tokenizer: str, model: str) -> str:
    """Return where the tokenizer is: `tokenizer`, or for `auto` bytes for a preset and otherwise the model's directory.

    Raises:
        ValueError: for `auto`, if the model's directory holds no tokenizer.
    """
    if tokenizer != AUTO:
        return tokenizer
    folder = Path(model).expanduser()
    if model in PRESETS or not (folder / "config.json").is_file():  # no model: refused where models are loaded
        return BYTES
    for candidate in (folder, folder.parent / BESIDE):
        if any((candidate / name).is_file() for name in FILES):
            return str(candidate)
    raise ValueError(
        f"model={model} holds no tokenizer: set tokenizer to the directory of the model's own, or to {BYTES}"
    )


def load_tokenizer(tokenizer: str, bos: str = AUTO, parse_special: bool = False, chat_template: str = "") -> Tokenizer:
    """Return the byte tokenizer, or load one from the local directory `tokenizer`.

    Args:
        bos: "always" and "never" say whether documents begin with the tokenizer's BOS; "auto" does as the tokenizer.
        parse_special: whether special tokens written out in a text become their ids; in chats they always do, because
            templates write them out.
        chat_template: file with a chat template, instead of the tokenizer's own.

    Raises:
        ValueError: if it has no tokenizer, or for "always" no BOS, or if there is no file of that name.
    """
    if tokenizer == BYTES:
        return _with_bos(ByteTokenizer(chats=_chats(ByT5Tokenizer(), chat_template, BYTES)), bos)
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer={tokenizer} is not a directory: use a transformers tokenizer's, or {BYTES!r}")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"tokenizer={tokenizer}: transformers cannot read it: {error}") from error
    chats = _chats(loaded, chat_template, tokenizer)
    if isinstance(loaded, ByT5Tokenizer) and not parse_special:
        return _with_bos(ByteTokenizer(tokenizer, chats=chats), bos)
    begins = bos == "always" or (bos == AUTO and loaded.bos_token_id in loaded("a", verbose=False)["input_ids"][:1])
    found = TextTokenizer(
        name=tokenizer,
        vocab_size=max(loaded.get_vocab().values()) + 1,
        tokenizer=loaded,
        bos=loaded.bos_token_id if begins else None,
        eos=loaded.eos_token_id,
        parse_special=parse_special,
        backend=_backend(loaded, parse_special),
        chats=chats,
    )
    return _with_bos(found, bos)


def _chats(loaded: Any, chat_template: str, name: str) -> ChatTemplate | None:
    """Give the tokenizer the chat template in a file, if one is named, and return it; None if it has none."""
    if chat_template:
        try:
            loaded.chat_template = Path(chat_template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template={chat_template} cannot be read: {error}") from error
    return ChatTemplate(loaded, name) if loaded.chat_template else None


def _backend(tokenizer: Any, parse_special: bool) -> Any:
    """Return a copy of the tokenizer of the package tokenizers that does the work; None if its class does more."""
    kind = type(tokenizer)
    own = (kind.__call__, getattr(kind, "_encode_plus", None))
    if own != (TokenizersBackend.__call__, TokenizersBackend._encode_plus):
        return None
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special
    return backend


def _with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    if bos == "always" and tokenizer.bos is None:
        raise ValueError(f"bos={bos}, but tokenizer={tokenizer.name} has no BOS: use auto")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, checkpoint: Path) -> None:
    """Save the tokenizer for `AutoTokenizer.from_pretrained`: a transformers one in `checkpoint`, bytes next to it.

    The byte tokenizer goes to the sibling directory `tokenizer`: for some model types AutoTokenizer would read the
    config.json in `checkpoint` and load that family's tokenizer class instead of ByT5's.
    """
    if isinstance(tokenizer, TextTokenizer):
        tokenizer.tokenizer.save_pretrained(checkpoint)
    else:
        saved = tokenizer.chats.tokenizer if isinstance(tokenizer.chats, ChatTemplate) else ByT5Tokenizer()
        saved.save_pretrained(checkpoint.parent / BESIDE)
