"""Local transformers tokenizers, and ByT5's tokenizer as the saved form of the byte tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, ByT5Tokenizer, TokenizersBackend

from usp.data.tokenizer import BYTES, ByteTokenizer, Ids, TextTokenizer, Tokenizer
from usp.presets import PRESETS

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


def load_tokenizer(tokenizer: str, bos: str = AUTO, parse_special: bool = False) -> Tokenizer:
    """Return the byte tokenizer, or load one from the local directory `tokenizer`.

    Args:
        bos: "always" and "never" say whether documents begin with the tokenizer's BOS; "auto" does as the tokenizer.
        parse_special: whether special tokens written out in a text become their ids.

    Raises:
        ValueError: if it has no tokenizer, or for "always" no BOS.
    """
    if tokenizer == BYTES:
        return _with_bos(ByteTokenizer(), bos)
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise ValueError(f"tokenizer={tokenizer} is not a directory: use a transformers tokenizer's, or {BYTES!r}")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"tokenizer={tokenizer}: transformers cannot read it: {error}") from error
    if isinstance(loaded, ByT5Tokenizer) and not parse_special:
        return _with_bos(ByteTokenizer(tokenizer), bos)
    begins = bos == "always" or (bos == AUTO and loaded.bos_token_id in loaded("a", verbose=False)["input_ids"][:1])
    found = TextTokenizer(
        name=tokenizer,
        vocab_size=max(loaded.get_vocab().values()) + 1,
        tokenizer=loaded,
        bos=loaded.bos_token_id if begins else None,
        eos=loaded.eos_token_id,
        parse_special=parse_special,
        backend=_backend(loaded, parse_special),
    )
    return _with_bos(found, bos)


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


def chat_prompt(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Ids:
    """Return the ids of a chat up to where the assistant's next message begins, shape (ids,), by its chat template.

    The template writes the special tokens, those that begin a document included.

    Raises:
        ValueError: if the tokenizer has no chat template, and if the template refuses the messages.
    """
    if not isinstance(tokenizer, TextTokenizer) or not tokenizer.tokenizer.chat_template:
        raise ValueError(
            f"messages need a chat template, which tokenizer={tokenizer.name} does not have: give the prompt as text, "
            f"or use a tokenizer with one"
        )
    try:
        ids = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template of tokenizer={tokenizer.name} fails for the messages: {error}") from error
    return np.asarray(ids, dtype=np.int64)


def save_tokenizer(tokenizer: Tokenizer, checkpoint: Path) -> None:
    """Save the tokenizer for `AutoTokenizer.from_pretrained`: a transformers one in `checkpoint`, bytes next to it.

    The byte tokenizer goes to the sibling directory `tokenizer`: for some model types AutoTokenizer would read the
    config.json in `checkpoint` and load that family's tokenizer class instead of ByT5's.
    """
    if isinstance(tokenizer, TextTokenizer):
        tokenizer.tokenizer.save_pretrained(checkpoint)
    else:
        ByT5Tokenizer().save_pretrained(checkpoint.parent / BESIDE)
