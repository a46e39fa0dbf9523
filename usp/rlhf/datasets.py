"""Prompts with answers, read from a file or built from source code.

    JSON lines,    {"prompt": ..., "answer": ...}                    prompts; sft trains on the answers
    Parquet        {"prompt": ..., "chosen": ..., "rejected": ...}   reward_model, dpo
    stdlib         find the mark hidden in a piece of the Python standard library's source code

A prompt is text, or a list of messages {"role": ..., "content": ...}, which may be under "messages" instead: the
tokenizer's chat template makes it a prompt for the assistant's next message, with the tools under "tools". Under
"messages" the last one may be the answer. The other values are text or a list of messages. What is trained on after a
prompt of messages is what the template has the assistant write; under "messages", that of all its messages. The other
names and keys of `usp.data.chats` are read too, such as a question with its response.

The built-in task has a verifiable answer and needs the whole prompt to be read. Examples held out of the training data
are for evaluations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from usp.data.chats import (
    ANSWERS,
    AS_TEXT,
    CONVERSATIONS,
    MESSAGES,
    PROMPT,
    QUESTIONS,
    USER,
    Chat,
    Mask,
    chat_of,
    completed,
    messages_of,
    question_of,
    text_of,
)
from usp.data.documents import DROP, REFUSE, json_rows, keys_lines, without_nulls
from usp.data.sources import STDLIB, DataFile, find_files, read_json
from usp.data.tokenizer import Ids, Tokenizer, as_document, chat_encoder, encode_masked, unended, unended_line
from usp.parallel import Violation, all_of, option, violation_of
from usp.rlhf.environments.benchmarks import BENCHMARKS
from usp.rlhf.environments.ready_rewards import BENCHMARK
from usp.run.failures import nearest

from .samples import Samples, balance, mini_batch_ids

MARKS = "①②③④⑤⑥⑦⑧"
QUESTION = "\n# mark: "
SHORTEST = 64  # tokens in a built-in prompt
ROW_OF = {"lines": "line", "parquet": "row"}  # formats of files of examples, and how a place in one is called
_LARGE = 2**24  # data sets with more examples are not shuffled: no run reaches a second epoch


@dataclass(frozen=True, eq=False)
class Example:
    """One prompt."""

    prompt: Ids  # without an end of sequence
    answer: str  # the correct response
    rejected: str = ""  # a worse response, for preference pairs
    sequences: tuple[tuple[Ids, Mask], ...] = ()  # of a file's lines that are trained on whole, see `sequences_of`
    unended: int = 0  # answers in these without a token that ends a response
    chat: Chat | None = None  # of a prompt of messages, which are left out: what else its chat template was given
    row: str = ""  # its line, of a file of prompts to sample for
    benchmark: str = ""  # its name, of a row of one


class FileExamples(list[Example]):
    """The examples of a file. notes: lines that say which keys are read, and what was left out."""

    def __init__(self, examples: Iterable[Example], notes: tuple[str, ...] = ()) -> None:
        super().__init__(examples)
        self.notes = notes


@dataclass(frozen=True, eq=False)
class HiddenMark:
    """Synthetic task: up to `prompt_tokens` of source code with one of `MARKS` at a random place; name the mark.

    Prompt lengths are log-uniform down to a sixteenth of `prompt_tokens`: a model learns the task on short prompts
    first. An example depends only on its index and the seed. A fraction `wrong_answers` of the examples has a wrong
    answer, like noisy demonstrations.
    """

    files: Sequence[DataFile]
    tokenizer: Tokenizer
    prompt_tokens: int
    seed: int
    wrong_answers: float = 0.0
    size: int = 2**31
    notes: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        draw = np.random.default_rng((self.seed, index))
        mark, other = draw.choice(len(MARKS), size=2, replace=False)
        hidden, question = self.tokenizer.encode(MARKS[mark]), self.tokenizer.encode(QUESTION)
        shortest = max(SHORTEST, self.prompt_tokens // 16)
        tokens = round(shortest * (self.prompt_tokens / shortest) ** draw.random())
        text = self._text(draw, tokens - len(hidden) - len(question) - (self.tokenizer.bos is not None))
        place = draw.integers(len(text) + 1)
        ids = np.concatenate((text[:place], hidden, text[place:], question))
        prompt = as_document(self.tokenizer, ids, end=False)
        # Some are malformed, so that a policy cannot exploit the reward model with formats it has never seen.
        rejected = draw.choice([f"{other + 1}", f"{other + 1}", f"{mark + 1}{other + 1}", ""])
        answer = other if draw.random() < self.wrong_answers else mark
        return Example(prompt, str(answer + 1), str(rejected))

    def _text(self, draw: np.random.Generator, tokens: int) -> Ids:
        parts: list[Ids] = []
        while (missing := tokens - sum(map(len, parts))) > 0:
            ids = _ids_of(self.files[int(draw.integers(len(self.files)))].path, self.tokenizer)
            start = int(draw.integers(max(1, len(ids) - missing + 1)))
            parts.append(ids[start : start + missing])
        return np.concatenate(parts)


@lru_cache(maxsize=64)
def _ids_of(path: Path, tokenizer: Tokenizer) -> Ids:
    return tokenizer.encode(path.read_text("utf-8", "replace"))


Examples: TypeAlias = FileExamples | HiddenMark


def known_of(examples: Sequence[Example] | HiddenMark) -> dict[str, Any]:
    """Return what gives the answer of an example by its index, and its line: nothing where it is not from a file."""
    return {
        "answer": lambda index: examples[index].answer,
        "row": lambda index: json.loads(examples[index].row or "{}"),
    }


def open_examples(
    data: str,
    keys: Sequence[str],
    tokenizer: Tokenizer,
    *,
    prompt_tokens: int,
    longest: int,
    seed: int,
    wrong_answers: float = 0.0,
    whole: bool = False,
    drop_long: bool = False,
    bad_rows: str = REFUSE,
    optional: Sequence[str] = (),
    tools: list[dict[str, Any]] | None = None,
) -> Examples:
    """Open `data`: stdlib, or a file of JSON lines or of Parquet that have text or messages under each of `keys`.

    Args:
        prompt_tokens: length of the longest built-in prompt.
        longest: maximum tokens in a prompt, so that the response fits the model's context.
        wrong_answers: fraction of built-in examples with a wrong answer.
        whole: prompt and answer are trained on together, so together they must fit in `longest`.
        drop_long: leave out lines that do not fit in `longest`. bad_rows: with "drop", leave out invalid ones.
        optional: those of `keys` that a line may lack, and then has empty text under.
        tools: schemas that the chat template describes in prompts of messages without tools of their own.

    Raises ValueError naming every invalid line, and prompts that are too long.
    """
    if data == STDLIB:
        if not SHORTEST <= prompt_tokens <= longest:
            fits = f"at least {SHORTEST}, and at most {longest} to fit the context beside a response"
            raise ValueError(option("prompt_tokens", prompt_tokens) + f" must be {fits}")
        return HiddenMark(find_files(STDLIB, "").files, tokenizer, prompt_tokens, seed, wrong_answers)
    name, _, path = data.partition("=")
    name = name if name in BENCHMARKS else ""
    file, given = Path(path if name else data).expanduser(), option("data", data)
    if not file.is_file() or not (unit := ROW_OF.get((source := DataFile.of(file)).format)):
        kinds = "stdlib, or a .jsonl or .parquet file, or JSON lines without a suffix, with "
        raise ValueError(given + f" must be {kinds}{', '.join(keys)}")
    examples, problems, long, bad = list[Example](), list[Violation](), list[Violation](), list[Violation]()
    read, shared = Counter[tuple[tuple[str, ...], ...]](), dict[str, Chat | None]()
    with closing(json_rows(source)) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{unit} {number}"
            try:
                if isinstance(line, ValueError):
                    raise line
                if not line.strip():
                    continue
                row = _row(line, where, keys)
                asked = row
                if name:
                    prompt, answer = BENCHMARKS[name].asked(row)
                    messages = [{"role": USER, "content": prompt}]
                    asked = _ReadRow({PROMPT: messages if tokenizer.chats else prompt, "answer": answer})
                example = _parse(asked, where, keys, tokenizer, longest, whole, optional, tools)
                chat = shared.setdefault(repr(example.chat), example.chat)
                line = json.dumps({**row, BENCHMARK: name}) if name else line
                examples.append(replace(example, chat=chat, row="" if whole else line, benchmark=name))
                read[row.names()] += 1
            except _TooLong as error:
                (long if drop_long else problems).append(f"{where}: " + violation_of(error))
            except ValueError as error:
                listed = bad if bad_rows == DROP else problems
                said = violation_of(error)
                listed.append(said if str(said).startswith(f"{where}: ") else f"{where}: " + said)
    if problems:
        more = f"; and {len(problems) - 5} more {unit}s" if len(problems) > 5 else ""
        raise ValueError(given + ": " + all_of(problems[:5]) + more)
    if not examples:
        none = f"no prompt of at most {longest} tokens, as " + option("long_prompts", "drop") + " asks for"
        why = f"no good {unit}: " + bad[0] if bad else none if long else f"no {unit}s"
        raise ValueError(given + " holds " + why)
    left_out = {"are too long for the context and left out": long, "were left out by --bad-rows drop": bad}
    notes = [f"{len(each)} {unit}s {why}; the first: {each[0]}" for why, each in left_out.items() if each]
    notes += filter(None, [unended_line(sum(example.unended for example in examples), tokenizer)])
    return FileExamples(examples, (*keys_lines(read, f"{unit}s"), *notes))


class _TooLong(ValueError):
    """A line whose tokens exceed the model's context."""


class _ReadRow(dict[str, Any]):
    """A row that knows which of its keys have been read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._keys, self._read = tuple(values), set[str]()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the keys that have been read, and the others."""
        read = tuple(key for key in self._keys if key in self._read)
        return read, tuple(key for key in self._keys if key not in read)


def _row(line: str, where: str, keys: Sequence[str]) -> _ReadRow:
    try:
        row = read_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with the keys {', '.join(keys)}, got {type(row).__name__}")
    return _ReadRow(without_nulls(row, ("arguments",)))


def _parse(
    row: _ReadRow,
    where: str,
    keys: Sequence[str],
    tokenizer: Tokenizer,
    longest: int,
    whole: bool,
    optional: Sequence[str],
    tools: list[dict[str, Any]] | None,
) -> Example:
    _add_names(row, "answer" in keys, tokenizer, where)
    first = MESSAGES if MESSAGES in row and PROMPT not in row else PROMPT
    # What the assistant writes at the end of a chat is no part of its prompt, also where nobody asks for the answer.
    asked = first == MESSAGES and "chosen" not in keys and not (whole and "answer" in row)
    split = _answered(row, where) if asked else {}
    row.update(dict.fromkeys(set(optional) - row.keys(), "") | split)
    for key in (first, *keys[1:]):
        if key not in row:
            raise ValueError(f"{where}: no text under {key!r}{nearest(key, row)}")
    prompt, chat = _prompt(row, first, tokenizer, where, tools)
    if not len(prompt):
        raise ValueError(f"{where}: a prompt of 0 tokens, expected at least 1")
    dropping = option("long_prompts", "drop")
    advice = ": shorten it, drop such lines with " + dropping + ", or use a model with a longer context"
    if len(prompt) > longest:
        fits = f"expected 1 to {longest} so that the response fits the model's context"
        raise _TooLong(f"a prompt of {len(prompt)} tokens, {fits}" + advice)
    sequences, endless = [], 0
    for key in keys[1:] if whole else ():
        content = completed(row, first, key, where)
        if isinstance(content, Chat) and split:
            content = replace(content, prompt=0)  # with all that the assistant writes, as in train.py
        ids, targets, _ = encode_masked(tokenizer, content)
        end = int(np.flatnonzero(targets)[-1]) + 1  # where a response would end
        sequences.append((ids[:end], targets[:end]))
        endless += unended(tokenizer, *sequences[-1]) if isinstance(content, Chat) else 0
        if (tokens := len(sequences[-1][0])) > longest:
            sizes = f"a prompt of {len(prompt)} tokens and {tokens - len(prompt)} under {key!r}"
            raise _TooLong(f"{sizes} exceed the model's context of {longest}" + advice)
    texts = {key: "" if whole and isinstance(row[key], list) else text_of(row[key], key, where) for key in keys[1:]}
    answer, rejected = ("chosen", "rejected") if "chosen" in keys else ("answer", "")
    return Example(prompt, texts.get(answer, ""), texts.get(rejected, ""), tuple(sequences), endless, chat)


def _add_names(row: _ReadRow, answered: bool, tokenizer: Tokenizer, where: str) -> None:
    """Put what is under the other names that `usp.data.chats` knows under prompt, messages and answer, too. answered:
    whether an answer is needed. A question is a message if the tokenizer has a chat template."""
    if CONVERSATIONS in row and MESSAGES not in row:
        row[MESSAGES] = row[CONVERSATIONS]
    asked = next((key for key in QUESTIONS if MESSAGES not in row and isinstance(row.get(key), str)), "")
    known = [key for key in (ANSWERS if asked else ANSWERS[:2]) if key in row]
    if answered and known and "answer" not in row:
        row["answer"] = row[known[0]]
    if asked and (asked != PROMPT or (answered and known and (PROMPT, known[0]) not in AS_TEXT)):
        question = question_of(row, asked, where)
        row[PROMPT] = f"{question}\n" if tokenizer.chats is None else [{"role": USER, "content": question}]


def _answered(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a chat that the assistant's message ends as a prompt, and its answer if the row has no other; nothing for
    another chat."""
    messages = messages_of(row[MESSAGES], MESSAGES, where)
    if messages[-1]["role"] != "assistant":
        return {}
    return {MESSAGES: messages[:-1], "answer": row.get("answer", messages[-1:])}


def _prompt(
    row: dict[str, Any], key: str, tokenizer: Tokenizer, where: str, tools: list[dict[str, Any]] | None
) -> tuple[Ids, Chat | None]:
    """Return the ids of text, or of messages to which the assistant responds, with a description of `tools`, and what
    else the chat template was given for these."""
    value = row[key]
    if isinstance(value, str) and key == PROMPT:
        return as_document(tokenizer, tokenizer.encode(value), end=False), None
    chat, encoder = chat_of(row, messages_of(value, key, where), where), chat_encoder(tokenizer, where)
    prompt = encoder.prompt(chat)
    if tools and not chat.tools:
        plain, chat = prompt, replace(chat, tools=tools)
        prompt = encoder.prompt(chat)
        if np.array_equal(prompt, plain):
            template = f"{where}: the chat template of " + option("tokenizer", tokenizer.name)
            raise ValueError(template + " does not describe tools")
    return prompt, Chat("", [], chat.tools, template=chat.template)


def sequences_of(example: Example, tokenizer: Tokenizer, pairs: bool) -> Sequence[tuple[Ids, Mask]]:
    """Return what is trained on, the ids and which are targets: a prompt with its answer, or with each of a pair."""
    if example.sequences:
        return example.sequences
    responses = [tokenizer.encode(text) for text in (example.answer, *((example.rejected,) if pairs else ()))]
    whole = [np.concatenate((example.prompt, as_document(tokenizer, ids, begin=False))) for ids in responses]
    return [(ids, np.arange(len(ids)) >= len(example.prompt)) for ids in whole]


def given_samples(
    examples: Sequence[Example], indices: Sequence[int], keys: Sequence[str], tokenizer: Tokenizer, pairs: bool = False
) -> Samples:
    """Return the samples that a graph begins with, for some examples and their indices.

    keys: given keys of the graph; without prompt_ids, each example is one sequence, or with `pairs` two.
    """
    if "prompt_ids" in keys:
        return prompt_samples(examples, indices, keys)
    sequences = [sequence for example in examples for sequence in sequences_of(example, tokenizer, pairs)]
    values = {
        "tokens": [torch.from_numpy(ids) for ids, _ in sequences],
        "mask": [torch.from_numpy(np.append(targets[1:], False)).float() for _, targets in sequences],
    }
    return Samples(tuple(range(len(sequences))), {key: values[key] for key in keys})


def prompt_samples(examples: Sequence[Example], indices: Sequence[int], keys: Sequence[str]) -> Samples:
    """Return prompts, with the indices of their examples, as samples with `keys`."""
    values: dict[str, list[Tensor]] = {
        "prompt_ids": [torch.from_numpy(example.prompt) for example in examples],
        "prompt_index": [torch.tensor(index) for index in indices],
    }
    return Samples(tuple(range(len(examples))), {key: values[key] for key in keys})


def example_indices(begin: int, count: int, size: int, seed: int) -> list[int]:
    """Return the examples at positions begin to begin + count - 1 of an endless stream, reshuffled every epoch. Depends
    only on the position, so a run can resume anywhere and with another number of examples per step."""
    if size > _LARGE:
        return [position % size for position in range(begin, begin + count)]
    positions = [divmod(position, size) for position in range(begin, begin + count)]
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(size) for epoch, _ in positions}
    return [int(orders[epoch][offset]) for epoch, offset in positions]


@dataclass(frozen=True, eq=False)
class Supervised:
    """Supervised samples that the policy trains on besides: `samples` of them in every step that `every` divides.

    weight: of their mean cross-entropy in the loss of an optimizer step.
    """

    examples: Examples
    tokenizer: Tokenizer
    samples: int
    every: int
    weight: float
    seed: int

    def of_step(self, step: int, mini_batches: int, part: int, parts: int) -> list[Samples]:
        """Return what one of `parts` data-parallel ranks has of each mini-batch, with `weights` that make a mean over
        its targets of a sum; [] in other steps. It depends on the step alone, so a run can resume anywhere."""
        if step % self.every:
            return []
        begin = (step // self.every - 1) * self.samples
        indices = example_indices(begin, self.samples, len(self.examples), self.seed)
        examples, batches = [self.examples[index] for index in indices], []
        whole = given_samples(examples, indices, ("tokens", "mask"), self.tokenizer)
        for number in range(mini_batches):
            batch = mini_batch_ids(self.samples, mini_batches, number)
            targets = sum(int(whole["mask"][sample].sum()) for sample in batch)
            own = whole.of(balance(batch, list(map(len, whole["tokens"])), parts)[part])
            weights = [mask / targets for mask in own["mask"]]
            batches.append(Samples(own.ids, {"tokens": own["tokens"], "weights": weights}))
        return batches


def hold_out(examples: Examples, number: int, seed: int) -> tuple[Examples, list[Example]]:
    """Divide examples into those to train on, in their order, and `number` random ones that `seed` determines.

    number: less than there are examples.
    """
    size = len(examples)
    if not number:
        return examples, []
    if isinstance(examples, HiddenMark):  # training reads it from the beginning
        return replace(examples, size=size - number), [examples[index] for index in range(size - number, size)]
    chosen = set(np.random.default_rng((seed, size)).choice(size, number, replace=False).tolist())
    rest = FileExamples([examples[index] for index in range(size) if index not in chosen], examples.notes)
    return rest, [examples[index] for index in sorted(chosen)]
