"""python -m usp tokenize: tokenize a data set once, into a token store."""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tyro.conf import arg

from usp.config import DocumentFlags
from usp.data.cache import token_lines
from usp.data.chats import excerpt
from usp.data.documents import keys_of
from usp.data.sources import find_files
from usp.data.store import TokenStore, is_store
from usp.fields import AtLeast0, value_violations
from usp.run.metrics import count

from .flags import check


@dataclass(frozen=True)
class _Named:
    data: Annotated[str, arg(metavar="stdlib|PATH")]
    """Text, JSON, JSONL, CSV, Parquet or Arrow file, compressed or not, or a directory of them. stdlib: the source code
    of Python's standard library."""
    tokenizer: Annotated[str, arg(metavar="bytes|PATH")]
    """Local transformers tokenizer directory, the model's for chats with images. bytes: byte-level, as in ByT5."""
    output: Annotated[Path, arg(metavar="STORE")]
    """Folder of the store; created."""


@dataclass(frozen=True)
class TokenizeConfig(DocumentFlags, _Named):
    """Tokenize documents into a token store, which --data of train.py takes. After a kill, the same command goes on
    where it was.

    For example: python -m usp tokenize --data corpus/ --tokenizer ~/models/Llama-3.1-8B --output corpus.tokens
    """

    chat_template: Annotated[str, arg(metavar="FILE", help_behavior_hint="(optional)")] = ""
    """Chat template (Jinja) for messages, instead of the tokenizer's own."""
    show: AtLeast0 = 0
    """Documents to print at the end, the first ones, with what is trained on in color."""
    processes: AtLeast0 = 0
    """Processes that tokenize. 0: one per core, and for less than 64 MB of data only this one."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Write the store that `argv` asks for; raise ValueError for data and folders that do not fit."""
    asked = tyro.cli(TokenizeConfig, args=argv, prog=prog)
    from usp.data.tokenizing import write_store
    from usp.hf.processors import load_images
    from usp.hf.tokenizers import load_tokenizer

    check(*value_violations(asked).values())
    if is_store(Path(asked.data).expanduser()):
        raise ValueError(f"--data = {asked.data} is a token store already: give the documents")
    files = find_files(asked.data, asked.data_field)
    options = asked.bos, asked.parse_special_tokens, asked.chat_template, asked.train_on, asked.add_tokens
    tokenizer = load_tokenizer(asked.tokenizer, *options, load_images(asked.tokenizer))
    keys = keys_of(files.files, asked.data_field, asked.bad_rows)
    lines = [f"{len(files.files)} files below {files.root}", files.left_out_line(), *keys]
    print("\n".join(filter(None, lines)), flush=True)
    begin = time.perf_counter()
    try:
        written = write_store(files, asked.data_field, tokenizer, asked.output, asked.processes, asked.bad_rows)
    except KeyboardInterrupt:
        sys.exit(f"interrupted: the same command goes on with {asked.output}")
    seconds = time.perf_counter() - begin
    store = TokenStore(asked.output)
    held = store.manifest
    took = f"in {seconds:,.1f} s" if written else "there already"
    print(
        f"{asked.output}: {held.documents} documents, {count(held.characters)} characters, {count(held.tokens)} tokens "
        f"({held.dtype}), {took}"
    )
    if held.dropped:
        print(f"{held.dropped} rows were left out; the first: {held.why_dropped}")
    for line in token_lines(store, tokenizer):
        print(line)
    if held.replaced:
        print(f"{held.replaced} characters of the data are U+FFFD: bytes that are not UTF-8")
    for number in range(min(asked.show, held.documents)):
        (first,), (end,) = store.bounds(np.array([number]))
        print(f"document {number}:")
        print(excerpt(store.read(first, end), store.read_mask(first, end), tokenizer.show, sys.stdout.isatty()))
