"""The calls of a step, and DataflowGraph: their edges by input and output keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .environments.episodes import Episodes
from .samples import Samples

Reduce: TypeAlias = Callable[[Tensor], Tensor]  # sums a tensor over all ranks of a call


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a micro-batch of one row, whose tokens may be sharded over sequence-parallel ranks.

    Attributes:
        sequence_BS: index of the sequence that each of this rank's tokens belongs to; `count` for padding.
        count: sequences in the row.
    """

    sequence_BS: Tensor
    count: int
    group: dist.ProcessGroup

    def sums(self, x_BS: Tensor) -> Tensor:
        """Sum x over ALL tokens of each sequence: (sequences,), in the order of sample ids; differentiable. Every
        sequence-parallel rank gets the same sums."""
        local = x_BS.new_zeros(self.count + 1).index_add(0, self.sequence_BS.flatten(), x_BS.flatten())
        return _SumOverRanks.apply(local[:-1], self.group) if self.group.size() > 1 else local[:-1]

    def spread(self, x_N: Tensor) -> Tensor:
        """Give each of this rank's tokens the number of its sequence, (B, S); 0 in padding."""
        return pad(x_N, (0, 1))[self.sequence_BS]

    def share(self, loss: Tensor) -> Tensor:
        """Return this rank's share of a loss that every sequence-parallel rank computes from `sums`."""
        return loss / self.group.size()


class _SumOverRanks(torch.autograd.Function):
    """Sum over a group. Every rank's use of the sum contributes to the loss, so the gradient is summed too."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _SumOverRanks.apply(grad, ctx.group), None


class Objective(Protocol):
    """The loss that a train step minimizes, computed from the model's output for this rank's tokens.

    Attributes:
        head: "logprobs": log-probabilities of the next tokens; "values": the scalar head's output.
        entropy: also compute entropies, for "logprobs".
        keys: per-token keys of `Samples` to pass in, as float32 (B, S) sharded like the tokens, 0 in padding.
        counts: the one of `keys` that is 0 where the output does not count. Log-probabilities and entropies are not
            computed there, but 0. "": all count.
        unit: number of samples with consecutive ids that must share a micro-batch (2 for pairs).
    """

    head: Literal["logprobs", "values"] = "logprobs"
    entropy: bool = False
    counts: str = ""
    unit: int = 1
    temperature: float = 1.0

    @property
    def keys(self) -> tuple[str, ...]: ...

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's share of the loss (0-dim), and detached 0-dim metrics.

        Both are summed over ranks and micro-batches; of metrics named *_max the largest is taken. The given weights
        carry the normalization, computed over the whole mini-batch beforehand, so the sum is the same loss in every
        layout.
        """
        ...


@dataclass(frozen=True)
class Generate:
    """Sample `group_size` responses to each prompt. Reads prompt_ids, writes tokens, mask, logprobs, finished.

    Attributes:
        temperature: 0 decodes greedily. top_k: 0 disables. top_p: 1 disables.
        stop_ids: a response ends with the first of these, which it includes.
        stop_strings: it also ends with the first token after which its text contains one of these.
        episodes: a response consists of turns, which end so, and an environment answers each. Also reads prompt_index,
            and writes score, the sum of the rewards; and of every token, as `mask` does, its turn, from 1 (turns), and
            the reward of a turn at its last token (turn_rewards). Of agents also the conversation of each token, from
            0 (branches), which attends to no other.
        partial: generation may stop, and go on with other weights. Also writes the version of the weights that wrote
            each token, as `mask` does (versions): the number of steps that had trained them.
        routed: how many numbers say which experts a token chose, see `usp.hf.routers`; also writes these, of one
            token after another (routed_experts). 0: does not.
    """

    group_size: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    episodes: Episodes | None = None
    partial: bool = False
    routed: int = 0


@dataclass(frozen=True)
class Inference:
    """One forward over whole sequences. Reads tokens; writes the output of `head` under its one output key. Like a
    train step, it lets tokens choose the experts in ROUTED, if it reads it.

    logprobs: (tokens,) of the next token, at `temperature`; 0 where `mask` is, if the call reads it. values: (tokens,)
    of the scalar head. score: 0-dim, the scalar head at the last token.

    adapters: False: compute with the role's base, as without its adapters.
    """

    head: Literal["logprobs", "values", "score"]
    temperature: float = 1.0
    adapters: bool = True


@dataclass(frozen=True)
class TrainStep:
    """Optimizer steps on the samples of a step: `epochs` passes over `mini_batches` mini-batches.

    A mini-batch has consecutive sample ids, so it is the same in every layout.

    stop_above: (metric, bound): end the call before an optimizer step whose mini-batch metric exceeds the bound.
    """

    objective: Objective
    mini_batches: int = 1
    epochs: int = 1
    stop_above: tuple[str, float] | None = None


@dataclass(frozen=True)
class Compute:
    """A function of samples without a model, such as rewards or advantages. The samples are split over its ranks.

    function(samples, reduce) -> the same samples with the output keys. `reduce` sums over all of the call's ranks, for
    statistics of the whole step; every rank must call it equally often, even without samples.

    Attributes:
        unit: number of samples with consecutive ids that must share a rank.
        scalars: output keys with one number per sample; the others have one per token. All are float32.
        first: number of samples that it is called with, the first of the step; None: all.
    """

    function: Callable[[Samples, Reduce], Samples]
    unit: int = 1
    scalars: tuple[str, ...] = ("score",)
    first: int | None = None


Work: TypeAlias = Generate | Inference | TrainStep | Compute


@dataclass(frozen=True)
class ModelCall:
    """One call of a step.

    Attributes:
        role: the model (actor, critic, ref, reward, or another name); "" for `Compute`.
        inputs, outputs: keys of `Samples`.
    """

    name: str
    role: str
    work: Work
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return generate, inference, train_step or compute."""
        kinds = {Generate: "generate", Inference: "inference", TrainStep: "train_step", Compute: "compute"}
        return kinds[type(self.work)]


ROLES = ("actor", "critic", "ref", "reward")  # those that the trainer has flags for; an algorithm may have others


@dataclass(frozen=True)
class DataflowGraph:
    """The calls of a step and the keys that it begins with.

    Attributes:
        given: keys of the samples that every rank passes to each step.
        elsewhere: train steps of another graph, whose weights the calls of their roles use.
        share_prefixes: models compute a prompt once for its samples, which therefore stay on one data-parallel rank
            where there are prompts for all of them.
        depth: how many steps ahead of the training on them rollouts are made; 0: on policy.

    Raises ValueError naming every violation: duplicate names and keys, inputs without a producer, cycles, missing
    roles, unknown kinds, and inputs or outputs that a call's kind does not support.
    """

    calls: tuple[ModelCall, ...]
    given: tuple[str, ...]
    elsewhere: tuple[ModelCall, ...] = ()
    share_prefixes: bool = False
    depth: int = 0

    def __post_init__(self) -> None:
        violations = [*self._key_violations(), *(text for call in self.calls for text in _call_violations(call))]
        trained = Counter(call.role for call in self.calls if isinstance(call.work, TrainStep))
        violations += [
            f"role {role} has {number} train steps, expected at most one: use epochs and mini_batches"
            for role, number in trained.items()
            if number > 1
        ]
        sizes = sorted({call.work.group_size for call in self.calls if isinstance(call.work, Generate)})
        if len(sizes) > 1:
            violations.append(f"all generate calls must have the same group_size, got {sizes}")
        if not self.calls:
            violations.append("a graph must have at least one call")
        if violations:
            raise ValueError("; ".join(violations))

    def _key_violations(self) -> Iterator[str]:
        names = Counter(call.name for call in self.calls)
        yield from (f"{number} calls are named {name!r}" for name, number in names.items() if number > 1)
        producers: dict[str, list[str]] = {key: ["the step's given keys"] for key in self.given}
        for call in self.calls:
            for key in call.outputs:
                producers.setdefault(key, []).append(call.name)
        yield from (f"key {key!r} comes from {' and '.join(by)}" for key, by in producers.items() if len(by) > 1)
        known = ", ".join(sorted(producers)) or "none"
        for call in self.calls:
            for key in call.inputs:
                if key not in producers:
                    yield f"call {call.name!r} reads {key!r}, which no call produces (keys: {known})"
        if len(names) == len(self.calls):
            try:
                TopologicalSorter({call.name: self.consumers(call.name) for call in self.calls}).prepare()
            except CycleError as error:
                yield f"calls wait for each other: {' -> '.join(reversed(error.args[1]))}"

    def __getitem__(self, name: str) -> ModelCall:
        return self._calls[name]

    @cached_property
    def _calls(self) -> dict[str, ModelCall]:
        return {call.name: call for call in self.calls}

    @cached_property
    def producers(self) -> dict[str, str]:
        """Map each key to the call that produces it. Given keys are left out."""
        return {key: call.name for call in self.calls for key in call.outputs}

    def consumers(self, name: str) -> tuple[str, ...]:
        """Return the calls that read an output of the call `name`."""
        outputs = set(self[name].outputs)
        return tuple(call.name for call in self.calls if outputs & set(call.inputs))

    def before(self, name: str) -> tuple[str, ...]:
        """Return the calls of the same step that must end first: its producers, and for a train step its role's."""
        call = self[name]
        trains = isinstance(call.work, TrainStep)
        producers = {self.producers.get(key) for key in call.inputs}
        return tuple(
            other.name
            for other in self.calls
            if other is not call and (other.name in producers or (trains and other.role == call.role))
        )

    @cached_property
    def levels(self) -> tuple[tuple[ModelCall, ...], ...]:
        """Group the calls by the earliest time at which they could start, if all took equally long."""
        sorter = TopologicalSorter({call.name: self.before(call.name) for call in self.calls})
        sorter.prepare()
        levels = []
        while ready := sorter.get_ready():
            levels.append(tuple(call for call in self.calls if call.name in ready))
            sorter.done(*ready)
        return tuple(levels)

    @property
    def order(self) -> tuple[ModelCall, ...]:
        """The calls in topological order, each as early as possible."""
        return tuple(call for level in self.levels for call in level)

    @cached_property
    def rollouts(self) -> tuple[ModelCall, ...]:
        """The calls that make the samples of a step, in topological order: those with outputs, so no train steps."""
        return tuple(call for call in self.order if call.outputs)

    @property
    def rollouts_ahead(self) -> tuple[ModelCall, ...]:
        """The rollouts that run beside training on the samples of an earlier step; on policy there are none."""
        return self.rollouts if self.depth else ()

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that have calls: those of `ROLES` in that order, then others in the order of their calls."""
        called = dict.fromkeys(call.role for call in self.calls if call.role)
        return (*(role for role in ROLES if role in called), *(role for role in called if role not in ROLES))

    @cached_property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that have a train step."""
        return tuple(role for role in self.roles if self.train_call(role))

    def train_call(self, role: str) -> ModelCall | None:
        """Return the train step of a role, if it has one, including those of another graph (`elsewhere`)."""
        calls = (*self.calls, *self.elsewhere)
        return next((c for c in calls if c.role == role and isinstance(c.work, TrainStep)), None)

    @property
    def group_size(self) -> int:
        """Samples per prompt. Prompt p becomes samples p * group_size to (p + 1) * group_size - 1."""
        return next((call.work.group_size for call in self.calls if isinstance(call.work, Generate)), 1)

    def sharing_group(self, call: ModelCall) -> int:
        """Return how many samples of a call have one prompt, which they have once; 1 if nothing is shared."""
        shared = self.share_prefixes and isinstance(call.work, Inference | TrainStep) and unit(call) == 1
        return self.group_size if shared else 1


def unit(call: ModelCall) -> int:
    """Return how many samples with consecutive ids must stay on one data-parallel rank of a call."""
    work = call.work
    if isinstance(work, Generate):
        return work.group_size
    if isinstance(work, TrainStep):
        return work.objective.unit
    return work.unit if isinstance(work, Compute) else 1


def _call_violations(call: ModelCall) -> Iterator[str]:
    if not isinstance(call.work, Generate | Inference | TrainStep | Compute):
        yield f"call {call.name!r} is a {type(call.work).__name__}: use Generate, Inference, TrainStep or Compute"
        return
    who = f"{call.kind} call {call.name!r}"
    if isinstance(call.work, Compute) and call.role:
        yield f"{who} has role {call.role!r}, but a function has no model: use role=''"
    if not isinstance(call.work, Compute) and not call.role.isidentifier():
        yield f"{who} has the role {call.role!r}: name the model, such as {', '.join(ROLES)}"
    for what, keys in (("reads", call.inputs), ("produces", call.outputs)):
        yield from (f"{who} {what} {key!r} {n} times" for key, n in Counter(keys).items() if n > 1)
    if isinstance(call.work, Inference):
        if len(call.outputs) != 1:
            yield f"{who} must produce exactly one key, got {call.outputs}"
        if not tokens_key(call):
            yield f"{who} must read tokens, got {call.inputs}"
    if isinstance(call.work, TrainStep) and call.outputs:
        yield f"{who} must not have outputs, got {call.outputs}: a train step only changes weights"
    if isinstance(call.work, Generate):
        if call.work.group_size < 1:
            yield f"{who}: group_size={call.work.group_size} must be at least 1"
        if wrong := [key for key in call.outputs if not canonical(key)]:
            yield f"{who} produces {wrong}, expected {', '.join(GENERATED)}, with or without a prefix"
        if not tokens_key(call):
            yield f"{who} must produce tokens"
    if isinstance(call.work, TrainStep) and min(call.work.mini_batches, call.work.epochs) < 1:
        yield f"{who}: mini_batches={call.work.mini_batches} and epochs={call.work.epochs} must be at least 1"


@dataclass(frozen=True)
class KeyKind:
    """The dtype and shape of a key's values.

    tokens: the key of the sequences that the values have `width` entries per token of; "" for one number per sample.
    """

    dtype: torch.dtype
    tokens: str
    width: int = 1


ROUTED = "routed_experts"
BRANCHES = "branches"
GENERATED = {
    "tokens": torch.int64,
    "mask": torch.float32,
    "logprobs": torch.float32,
    "finished": torch.bool,
    "prompt_length": torch.int64,
    "score": torch.float32,
    "turns": torch.int64,
    "turn_rewards": torch.float32,
    "versions": torch.int64,
    ROUTED: torch.int16,
    BRANCHES: torch.int64,
}
OF_EPISODES = ("score", "turns", "turn_rewards")
_GENERATED_SCALARS = ("finished", "prompt_length", "score")


def generated_keys(work: Generate) -> tuple[str, ...]:
    """Return the keys of `GENERATED` that a generate call writes."""
    absent = (*(() if work.partial else ("versions",)), *(() if work.routed else (ROUTED,)))
    absent += () if work.episodes and work.episodes.begin else (BRANCHES,)
    return tuple(key for key in GENERATED if key not in absent and (work.episodes or key not in OF_EPISODES))


def with_branches(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph whose models read which conversation the tokens of an agent's episode belong to."""
    reads = (call for call in graph.calls if isinstance(call.work, Inference | TrainStep))
    more = {call.name: replace(call, inputs=(*call.inputs, BRANCHES)) for call in reads}
    return replace(graph, calls=tuple(more.get(call.name, call) for call in graph.calls))


def canonical(key: str) -> str:
    """Strip the prefix from a key of `GENERATED`; "" for any other key."""
    return next((name for name in GENERATED if key == name or key.endswith(f"_{name}")), "")


def tokens_key(call: ModelCall) -> str:
    """Return the key of the sequences that a call reads or generates; "" if there is none."""
    keys = call.outputs if isinstance(call.work, Generate) else call.inputs
    return next((key for key in keys if canonical(key) == "tokens"), "")


def key_kinds(graph: DataflowGraph) -> dict[str, KeyKind]:
    """Return the kind of every key that a call of the graph produces. Raises ValueError for keys without a shape."""
    kinds: dict[str, KeyKind] = {}
    for call in graph.order:
        tokens = tokens_key(call)
        for key in call.outputs:
            if isinstance(call.work, Generate):
                name = canonical(key)
                width = call.work.routed if name == ROUTED else 1
                kinds[key] = KeyKind(GENERATED[name], "" if name in _GENERATED_SCALARS else tokens, width)
            elif isinstance(call.work, Inference):
                kinds[key] = KeyKind(torch.float32, "" if call.work.head == "score" else tokens)
            elif isinstance(call.work, Compute):
                per_token = (kinds[name].tokens for name in call.inputs if name in kinds and kinds[name].tokens)
                sequences = tokens or next(per_token, "tokens")
                kinds[key] = KeyKind(torch.float32, "" if key in call.work.scalars else sequences)
    known = {*graph.given, *kinds}
    if lost := [key for key, kind in kinds.items() if kind.tokens and kind.tokens not in known]:
        raise ValueError(
            f"{', '.join(lost)}: per-token keys without tokens; list keys with one number per sample in `scalars`"
        )
    return kinds
