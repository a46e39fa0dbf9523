"""The pages of docs/reference that list every flag, from the fields that the programs parse.

python -m examples.reference                             # writes docs/reference/{train,rlhf,usp}.md
"""

from __future__ import annotations

import ast
import html
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest import mock

import tyro
from tyro.conf import Suppress

from usp.commands import rlhf, train
from usp.commands.flags import parse
from usp.fields import TYPE_NAMES, Rule, Shown, flag
from usp.run.launch import leave

PROGRAM = import_module("usp.__main__")
FOLDER = Path(__file__).parents[1] / "docs" / "reference"
# Subjects in the order of a page; a field belongs to the first whose pattern matches its whole name, and stands in the
# place of the alternative that does.
GROUPS = {
    "Algorithm": "algorithm|options|models|critic|ref|reward_model|ref_.*|group_size|prompts|sft_steps",
    "Model": "model|tokenizer|chat_template|rope_scaling|disable_dropout|freeze_encoder",
    "Data": "data.*|packing|bad_rows|long_prompts|prompt_tokens|wrong_answers|train_on|bos|parse_.*|add_.*|balance_.*",
    "Supervised data": "supervised_.*",
    "Rewards and environments": "reward_.*|agent|environment.*|tools|max_turns|max_observation_tokens",
    "Generation": "max_new_tokens|temperature|top_.|stop|stop_ids|slots|cache_tokens|eager_decoding"
    "|rollout_engine|rollout_cache|router_replay|share_prefixes|staleness|partial_rollouts|oversample|delta_updates",
    "Steps and batches": "seq_len|steps|train_tokens|.*batch_size|micro_batch.*|curriculum|seed",
    "Plan": "plan|tune_budget|hardware|search_budget|replan|rollout",
    "Parallelism": "sp_ulysses|sp_ring|sp_.*|dp_.*|zero|tp.*|pp.*|ep.*",
    "Memory": "ac|ac_offload|loss_chunk|mlp_tile|.*offload.*",
    "Computation": "attention_kernel|dtype|device|compile|async_tp|fp8.*",
    "Optimization": "learning_rate|optimizer|.*learning_rate|lr_.*|warmup_steps|weight_decay|max_grad_norm"
    "|muon_.*|adam_.*",
    "LoRA": "lora_.*",
    "Mixtures of experts": "router_.*",
    "Sparse attention": "indexer_.*",
    "Evaluation and samples": "eval_.*|early_.*|sample_.*|keep_best",
    "The run": "output|export_dtype|log_every|checkpoint_.*|keep_.*|resume|hang_timeout|profile|config",
    "Trackers": ".*_project|mlflow_experiment",
}
HEADING = "| flag | key | values | default | |\n| --- | --- | --- | --- | --- |"
HEAD = {
    "train": "train.py\n\nEvery flag of train.py, which trains and fine-tunes language models, for whoever knows what "
    "to change. The\n[guides](../guides/parallelism.md) say why.",
    "rlhf": "rlhf.py\n\nEvery flag of rlhf.py, which trains policies, reward models and critics, for whoever knows "
    "what to change. The\n[guides](../guides/rlhf/index.md) say why.",
    "usp": "python -m usp\n\nEvery command that plans, predicts and shows, with its flags. None of them but calibrate "
    "needs the devices that it is\nabout; the [planning pages](../planning.md) say what to ask first.",
}
NOTE = """# {head}

```bash
{command} --help
```

A flag with a key can be set in a YAML or TOML file, too, which flags override: `--config run.yaml` with `seq_len: 128K`
is `--seq-len 128K`. A flag that is true or false is `--flag` or `--no-flag` on the command line.

Written by `python -m examples.reference`.
"""


class _Captured(BaseException):
    """What a program gives to tyro.cli, which makes its flags and its help of it."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


@dataclass(frozen=True)
class Entry:
    """A row of a table, whose cells are Markdown."""

    name: str  # of the field
    flag: str
    key: str
    values: str
    default: str
    help: str

    @property
    def row(self) -> str:
        return f"| {' | '.join((self.flag, self.key, self.values, self.default, self.help))} |"


def parsed(run: Callable[[], object]) -> type:
    """Return the dataclass of flags that `run` has parsed."""

    def capture(kind: type, **_: object) -> None:
        raise _Captured(kind)

    with mock.patch.object(tyro, "cli", capture):
        try:
            run()
        except _Captured as captured:
            return captured.kind
    raise AssertionError("no command line was parsed")


def entries(kind: type) -> Iterator[Entry]:
    """Yield the flags of a dataclass, without those that its command hides."""
    hints = get_type_hints(kind, include_extras=True)
    has_file = "config" in hints
    for field in fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        if Suppress in marks:
            continue
        shown = next((mark for mark in marks if isinstance(mark, Shown)), None)
        rule = next((mark for mark in marks if isinstance(mark, Rule)), shown.rule if shown else None)
        told = next((mark for mark in marks if hasattr(mark, "help_behavior_hint")), None)
        words = (told and told.help) or _docstrings(kind).get(field.name) or ""
        positional = any("POSITIONAL" in repr(mark).upper() for mark in marks)
        of_type = get_args(hints[field.name])[0] if marks else hints[field.name]
        yield Entry(
            field.name,
            f"`{told.metavar}`" if told and positional else f"`{flag(field.name)}`",
            f"`{field.name}`" if has_file and field.name != "config" else "",
            _values(of_type, (told and told.metavar) or (shown and shown.metavar) or "", rule),
            _default(field.default, shown, told and told.help_behavior_hint),
            _text(words),
        )


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the strings below the fields of a dataclass and its bases, the help of their flags."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        except (OSError, TypeError):  # a class that is made when the command line is parsed
            continue
        for node, after in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(node.target)] = ast.literal_eval(after.value)
    return found


def _values(kind: Any, metavar: str, rule: Rule | None) -> str:
    """Return what a flag takes: its choices, or its form, and the rule on its values."""
    if get_origin(kind) is not None:
        kind = next((each for each in get_args(kind) if each is not type(None)), kind)
    if rule and rule.choices:
        return ", ".join(f"`{choice}`" for choice in rule.choices)
    form = f"<code>{_escaped(metavar)}</code>" if metavar else TYPE_NAMES.get(kind, "<code>PATH</code>")
    return f"{form}; {_text(rule.words)}" if rule else form


def _default(value: Any, shown: Shown | None, hint: Any) -> str:
    if isinstance(hint, str):
        words = hint.strip("()").removeprefix("default: ")
        return "" if words == "optional" else _text(words)
    if value is MISSING:
        return "required"
    if shown and value is not None:
        value = " ".join(shown.str_from_instance(value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value not in (None, "") else ""


def _text(words: str) -> str:
    """Return plain text as Markdown of one line, with flags as code."""
    return re.sub(r"(?<![\w`-])--[a-z][a-z0-9-]*", lambda found: f"`{found[0]}`", _escaped(" ".join(words.split())))


def _escaped(words: str) -> str:
    return html.escape(words, quote=False).replace("|", "&#124;").replace("*", "&#42;")


def tables(rows: Sequence[Entry]) -> str:
    """Return a table of flags for each subject; raise ValueError for a flag without one."""
    groups: dict[str, list[tuple[int, Entry]]] = {title: [] for title in GROUPS}
    patterns = [(title, place, name) for title, of in GROUPS.items() for place, name in enumerate(of.split("|"))]
    for entry in rows:
        found = next(((title, place) for title, place, name in patterns if re.fullmatch(name, entry.name)), None)
        if found is None:
            raise ValueError(f"{entry.flag} has no subject: add it to one of GROUPS")
        groups[found[0]].append((found[1], entry))
    ordered = {title: [entry for _, entry in sorted(of, key=lambda each: each[0])] for title, of in groups.items()}
    return "\n".join(f"## {title}\n\n{table(entries)}" for title, entries in ordered.items() if entries)


def table(rows: Sequence[Entry]) -> str:
    """Return one table of flags."""
    return "\n".join([HEADING, *(entry.row for entry in rows)]) + "\n"


def programs() -> dict[str, Callable[[list[str]], object]]:
    """Return what parses the words of a command line, by program."""
    return {
        "train.py": lambda words: parse(words, train.program.config),
        "rlhf.py": lambda words: parse(words, rlhf.program.config),
        **{name: partial(_command, name) for name in PROGRAM.COMMANDS},
    }


def _command(name: str, words: list[str]) -> None:
    PROGRAM.command_module(name).main(words, {}, name)


def pages() -> dict[str, str]:
    """Return the pages by name."""
    kinds = {program: parsed(partial(run, [])) for program, run in programs().items()}
    train, rlhf = kinds.pop("train.py"), kinds.pop("rlhf.py")
    return {
        "train": page("train", train),
        "rlhf": page("rlhf", rlhf),
        "usp": commands_page(kinds, {"train": train, "rlhf": rlhf}),
    }


def page(name: str, kind: type) -> str:
    """Return the page of a program's flags."""
    return NOTE.format(head=HEAD[name], command=f"python {name}.py") + "\n" + tables(list(entries(kind)))


def commands_page(kinds: Mapping[str, type], known: Mapping[str, type]) -> str:
    """Return the page of the commands: of a flag that train.py or rlhf.py has likewise, only the name. known: their
    flags by page."""
    parts = [NOTE.format(head=HEAD["usp"], command="python -m usp plan")]
    likewise = {which: {entry.name: entry for entry in entries(kind)} for which, kind in known.items()}
    for command, kind in kinds.items():
        of = "rlhf" if command.startswith("rlhf") else "train"
        rows = list(entries(kind))
        shared = [entry for entry in rows if likewise[of].get(entry.name) == entry]
        parts += [f"## {command}\n", f"`python -m usp {command}`: {_text(PROGRAM.COMMANDS[command])}.\n"]
        parts += [table([entry for entry in rows if entry not in shared])]
        if shared:
            names = f"It also takes these flags of [{of}.py]({of}.md): " + ", ".join(entry.flag for entry in shared)
            parts += [textwrap.fill(f"{names}.", 120, break_on_hyphens=False) + "\n"]
    return "\n".join(parts)


def main() -> None:
    for name, text in pages().items():
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"{FOLDER / name}.md: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
    leave()
