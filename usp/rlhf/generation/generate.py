"""Generation with a causal LM that is sharded over pp, ring, ulysses and tp ranks; which models it supports.

prefill    prompts, sharded over sp as in training; each rank caches the keys and values of its own tokens
decode     one token per slot, replicated over sp: hidden states pass along the pp axis, attention merges the partial
           results of the sp ranks; then
           logits -> gathered over tp -> sampled on one rank -> broadcast to all ranks of the data-parallel group
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from usp.attention import DecodeStep, KVCache, Prefill
from usp.attention.comm import gather_rows
from usp.hf.expert_parallel import same_tokens, serve_experts
from usp.hf.experts import expert_modules
from usp.hf.integrate import rotary_switch, run_layers
from usp.hf.models import SEVERAL_PARTS, ModelConfig, context_length, empty_model, readable_facts
from usp.hf.probe import MaskKind, structure
from usp.hf.prune import model_parts
from usp.hf.routers import ChoiceRecorder
from usp.hf.stage import CausalLMStage, logit_transform
from usp.losses import UNCHANGED, LogitTransform, softmax_dtype
from usp.parallel import ParallelMesh, local_tensor
from usp.rlhf.graph import BRANCHES, ROUTED, Generate, generated_keys
from usp.rlhf.samples import Samples, derived_seed
from usp.sp.sp_attention import UnifiedSPAttention

from .decoding import (
    Decode,
    GeneratedResponse,
    PrefillGroup,
    Rollout,
    Slots,
    Stops,
    cache_violation,
    capacity,
    fitting_slots,
    read_length,
    row_multiple,
    sample,
    sequence_key,
    token_keys,
)
from .graphs import StepGraphs, eager_reason
from .turns import Turns
from .vllm import Enough, VllmEngine


def generation_problems(config: ModelConfig) -> str:
    """Return why responses cannot be generated with the causal LM of `config`; empty if they can. Raises ValueError if
    a tiny copy of the model cannot be run, so that nothing is known."""
    if config.get_text_config() is not config:
        return SEVERAL_PARTS
    model: Any = empty_model(config, causal=True)
    known = structure(type(model), model.config)
    problems = [*known.problems, *cache_problems({mask.kind for mask in known.masks.values()})]
    if max(known.calls.values(), default=1) > 1:
        problems.append("its layers attend more than once, and a cache holds keys and values of one call")
    try:
        logit_transform(model)
    except (AttributeError, ValueError) as error:
        problems.append(str(error))
    facts, unread = readable_facts(config)
    if facts is None or facts.widths:
        problems.append(unread or "its layers differ in their heads, and a cache has one size")
    return "; ".join(problems)


def cache_problems(masks: Collection[MaskKind]) -> list[str]:
    """Return why a model with these kinds of masks cannot go on from cached keys and values."""
    return ["its attention sees later tokens"] if "bidirectional" in masks else []


_PREFILL_TOKENS = 16384  # maximum per forward, over all ranks of a sequence, unless one prompt is longer
_GRAPH_MULTIPLE = 512  # of the places that a captured step reads: few graphs, where reading takes no time
# The sequences in a decode step; its tokens and log-probabilities on the host, after an event; and chosen experts.
_Step = tuple[Sequence[Rollout | None], tuple[Tensor, Any], Tensor | None]


class _Static:
    """What decode steps read and write, in the same memory: a cache, inputs (5, slots) int64, the rows of
    `Slots.decode_inputs` and the keys of the noise, and the next tokens and their log-probabilities (2, slots), in
    float64, which is exact for every id."""

    def __init__(self, slots: int, places: int, device: torch.device) -> None:
        self.cache = KVCache.allocate(slots, places, device)
        self.inputs = torch.zeros(5, slots, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(2, slots, dtype=torch.float64, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.inputs, self.chosen, *self.cache.tensors]

    def free(self) -> None:
        """Free the memory; the tensors stay, for `restore`."""
        for x in self.tensors:
            x.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the memory again, with the values of new tensors."""
        for x in self.tensors:
            x.untyped_storage().resize_(x.nbytes)
            x.zero_()
        self.cache.clear(torch.arange(self.inputs.shape[1], device=self.inputs.device))


class Generator:
    """Generator of responses with this rank's stage of a model, with continuous batching.

    Args:
        model: a transformers causal LM, or a pipeline stage of it, after `apply_unified_sp` and `apply_tp`; its weights
            are plain tensors or DTensors over tp.
        first, last: the stage has the input embedding; the output head.
        slots: maximum number of sequences to decode concurrently.
        cache_tokens: maximum number of tokens that the KV cache has places for, over all ranks of a sequence: in a call
            whose sequences may be long, fewer of them are decoded at a time. 0 for no bound.
        transform: from `logit_transform`, for models with one.
        decode: of the tokenizer, for stop strings.
        gathered: weights that are sharded with FSDP2 have been gathered.
        eager: issue the operators of decode steps one by one on a GPU too, where CUDA graphs could have them.

    cache_bytes: size of this rank's KV cache in the last call.

    Raises ValueError naming every property of the model or the mesh that generation does not support.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        *,
        first: bool = True,
        last: bool = True,
        slots: int = 32,
        cache_tokens: int = 0,
        transform: LogitTransform = UNCHANGED,
        decode: Decode | None = None,
        gathered: bool = False,
        eager: bool = False,
    ) -> None:
        if violations := _model_violations(model, mesh, gathered):
            raise ValueError("; ".join(violations))
        self._model, self._mesh, self._first, self._last, self._slots = cast(Any, model), mesh, first, last, slots
        self._transform, self._decode_text, self._cache_tokens = transform, decode, cache_tokens
        self._attention = cast(UnifiedSPAttention, model.unified_sp)
        self._head = getattr(model, model_parts(self._model).head)  # DBRX's own method finds none without the embedding
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        self._captures = self._device.type == "cuda" and not (eager or eager_reason(model, mesh.dims))
        self._context = context_length(self._model.config)
        self._switch = rotary_switch(self._model.config)
        self._sp, self._sp_rank = mesh.size("sp"), mesh.rank("sp")
        self._groups = {axis: mesh.group(axis) for axis in ("tp", "sp", "pp") if mesh.size(axis) > 1}
        self._samples = last and self._sp_rank == 0 and mesh.rank("tp") == 0
        if self._samples:
            self._token_keys = token_keys(self._head.weight.shape[0], self._device)
        axes = self._attention.axes
        self._multiple = row_multiple(self._attention.layout, axes.ring, axes.ulysses)
        self._experts = expert_modules(model) if mesh.dims.ep > 1 else []
        # Experts that are spread over data-parallel ranks make these run the same number of forwards.
        spread = mesh.dims.ep > 1 and (self._sp * mesh.size("tp")) % mesh.dims.ep > 0
        self._together = mesh.group("dp_shard") if spread else None
        self.cache_bytes = 0
        self._recorder: ChoiceRecorder | None = None
        # Of the last call: what its steps read and wrote, without memory, their graphs, and the addresses in these.
        self._kept: tuple[_Static, StepGraphs, list[int]] | None = None

    def forget(self) -> None:
        """Free the CUDA graphs that are kept for the next call, with the memory of a step's intermediate tensors."""
        self._kept = None

    @staticmethod
    def of(stage: CausalLMStage, mesh: ParallelMesh, **options: Any) -> Generator:
        """Return a generator with a pipeline stage. options: of `Generator`."""
        return Generator(stage.model, mesh, first=stage.first, last=stage.last, transform=stage.transform, **options)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Tensor],
        work: Generate,
        seeds: Sequence[int],
        samples: Sequence[tuple[int, int]] = (),
        *,
        begun: Sequence[GeneratedResponse] | None = None,
        enough: Enough | None = None,
    ) -> list[GeneratedResponse]:
        """Return one response per prompt, the same on every rank of the data-parallel group.

        Collective over that group (pp, ring, ulysses, tp), whose ranks must pass the same arguments; groups are
        independent, unless experts are spread over several: these must call it together, also without prompts. Which
        sequences share a batch does not change the responses, except for rounding, and for which of equally good keys
        an indexer chooses.

        Args:
            prompts: 1-D integers, each with at least one token. `work.group_size` is ignored: repeat prompts instead.
            seeds: one per prompt; equal prompts with equal seeds get equal responses.
            samples: (id, prompt_index) of each, for the environments of `work.episodes`.
            begun: each response so far, which goes on. Episodes that this call does not complete can go on, too.
            enough: called with the number of each response that is complete, as it is; once it returns True, generation
                stops, and the others are not complete.

        Raises:
            ValueError: before any communication, naming every prompt that does not fit the model's context, or if the
                longest sequence does not fit in `cache_tokens`.
            RanksDisagree: on every rank, if their arguments differ.
            RuntimeError: on every rank, if the model's logits are not finite.
        """
        context, switch, episodes = self._context, self._switch, work.episodes
        observed = episodes.max_observation_tokens if episodes else 0
        rollouts = Rollout.begin(prompts, work, seeds, None if episodes else begun, context)
        violations = [
            f"prompt {index} has {len(prompt)} tokens, expected 1 to {context - 1} to leave room for a response in the "
            f"model's context of {context}"
            for index, prompt in enumerate(prompts)
            if not 0 < len(prompt) < context
        ] or [
            f"prompt {index} has {len(prompt)} tokens and its response up to {each.limit}: beyond "
            f"{switch} tokens rope_type='longrope' rotates all keys of a sequence differently, but cached ones stay: "
            f"use fewer new tokens"
            for index, (prompt, each) in enumerate(zip(prompts, rollouts, strict=True))
            if switch is not None and len(prompt) <= switch < len(each.prompt) + each.limit + observed
        ]
        places = self._places(rollouts, work)
        if not violations and (violation := cache_violation(self._cache_tokens, places, self._sp)):
            violations.append(violation)
        if self._most(bool(violations)):
            raise ValueError("; ".join(violations) or "another data-parallel rank has invalid prompts")
        started = [(r.given, r.seed) for r in rollouts]
        arguments = (len(rollouts), replace(work, episodes=None), self._slots, self._cache_tokens, started)
        self._mesh.agree(arguments, "the arguments of generate", tuple(self._groups))
        turns = None
        if episodes is not None:
            options: dict[str, Any] = {"leads": self._samples, "context": context, "agents": self._slots}
            turns = Turns(rollouts, episodes, samples, self._groups, begun, enough, **options)
        with closing(turns) if turns else nullcontext():
            if rollouts or self._together is not None:
                self._run(rollouts, work, places, turns, None if turns else enough)
        return turns.responses(self._routed) if turns else [each.response(self._routed(each)) for each in rollouts]

    def _run(
        self, rollouts: Sequence[Rollout], work: Generate, places: int, turns: Turns | None, enough: Enough | None
    ) -> None:
        """Decode the rollouts, and those that follow their turns. places: in the cache, of a sequence on a rank."""
        if work.routed and self._recorder is None:
            self._recorder = ChoiceRecorder(self._model)
        most = fitting_slots(self._slots, self._cache_tokens, places, self._sp)
        slots, ended = Slots(rollouts, most, turns.first if turns else None), Stops(work, self._decode_text)
        number, steps = len(slots.active), deque[_Step]()
        static, graphs = self._begin(number, places)
        cache, chosen = static.cache, static.chosen
        sampling = Generate(temperature=work.temperature, top_k=work.top_k, top_p=work.top_p)  # all of it in a graph
        step: Callable[[int, int], None] = partial(graphs or self._step, static, sampling)
        while True:
            if turns is not None and turns.waiting:
                slots.add(turns.go_on(wait=not (slots.pending or steps or self._together)))
                if turns.ended:
                    slots.stop()
            admitted = slots.admit()
            groups = slots.prefill_groups(admitted, self._multiple, _PREFILL_TOKENS)
            forwards = len(groups) + slots.pending
            while steps and not forwards:
                self._read(slots, steps.popleft(), ended, turns, enough)
            # A rank that waits for environments keeps those here with which it shares experts.
            most = self._most(2 * forwards + bool(turns and turns.waiting))
            if not most:
                break
            for _ in range(most // 2 - forwards):
                serve_experts(self._experts)
            if not forwards:
                continue
            if admitted:
                cache.clear(_to_device(torch.tensor(admitted), self._device))
            for group in groups:
                self._prefill(cache, group, slots.active)
            self._decode(static, slots, work, step)
            routed = None if self._recorder is None else self._recorder.take(number).to("cpu", non_blocking=True)
            copy = chosen.to("cpu", non_blocking=True, copy=True)  # to pinned memory
            copied = None if chosen.device.type == "cpu" else torch.cuda.current_stream(chosen.device).record_event()
            steps.append((slots.issue(), (copy, copied), routed))
            if len(steps) > 1:  # the device has the next one to do
                self._read(slots, steps.popleft(), ended, turns, enough)
        self.cache_bytes = cache.nbytes
        if graphs is not None and not self._groups:  # NCCL does not leave a group while a graph has messages of it
            self._kept = static, graphs, self._addresses(static)
            static.free()

    def _begin(self, slots: int, places: int) -> tuple[_Static, StepGraphs | None]:
        """Return what the steps of a call read and write, and their graphs: those of the call before if all that they
        read is where it was."""
        if not self._captures:
            return _Static(slots, places, self._device), None
        static, graphs, addresses = self._kept or (None, None, [])
        self._kept, had = None, 0 if static is None else static.cache.positions.shape[1]
        if static is None or static.inputs.shape[1] != slots or not places <= had <= 1.25 * places:
            static, graphs = _Static(slots, places, self._device), None
        else:
            static.restore()
        moved = graphs is None or addresses != self._addresses(static)
        return static, StepGraphs(self._step, self._device) if moved else graphs

    def _addresses(self, static: _Static) -> list[int]:
        """Return where all is that a step reads and did not make."""
        weights = map(local_tensor, (*self._model.parameters(), *self._model.buffers()))
        return [x.data_ptr() for x in (*weights, *static.tensors)]

    def _places(self, rollouts: Sequence[Rollout], work: Generate) -> int:
        """Return the places in the cache that any of the sequences needs on a rank."""
        if work.episodes is not None and rollouts:  # a turn may be as long as the whole episode before it
            most = max(len(r.prompt) + r.limit for r in rollouts) + work.episodes.max_observation_tokens
            rollouts = [Rollout([0] * most, 0, work.max_new_tokens)]
        return capacity(rollouts, self._sp, self._multiple) if rollouts else 0

    def _most(self, number: int) -> int:
        """Return the largest of the numbers of the data-parallel ranks that run forwards together."""
        if self._together is None:
            return number
        most = torch.tensor(number, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._together)
        return int(most)

    def _prefill(self, cache: KVCache, group: PrefillGroup, active: Sequence[Rollout | None]) -> None:
        """Cache the keys and values of prompts, padded on the right, where the causal mask hides it from them."""
        ids = torch.zeros(len(group.prompts), group.padded, dtype=torch.int64)
        for row, prompt in enumerate(group.prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        axes = self._attention.axes
        (local,) = axes.positions(axes.layout(self._attention.layout, group.padded))
        lengths = torch.tensor([len(group.prompts[row]) for row in group.rows])
        cached = (local < lengths.unsqueeze(1)).sum(1).tolist(), lengths.clamp(max=len(local)).tolist()
        for slot, *numbers in zip(group.slots, *cached, strict=True):
            rollout = active[slot]
            assert rollout is not None
            rollout.cached, rollout.most_cached = numbers
        slots, rows, lengths, own_there = (
            _to_device(x, self._device) for x in (torch.tensor(group.slots), torch.tensor(group.rows), lengths, local)
        )
        prefill = Prefill(cache, own_there, slots, rows, lengths)
        self._forward(_to_device(ids[:, local], self._device), own_there.expand(len(ids), -1), prefill)
        if self._recorder is not None:
            routed = self._recorder.take(len(ids) * len(local)).cpu().unflatten(0, (len(ids), -1))
            for slot, row in zip(group.slots, group.rows, strict=True):
                inside = local < len(group.prompts[row])
                cast(Rollout, active[slot]).routed.append((local[inside], routed[row, inside]))

    def _decode(self, static: _Static, slots: Slots, work: Generate, step: Callable[[int, int], None]) -> None:
        """Decode one token of every slot with `step`, which is `_step`."""
        columns, places = slots.decode_inputs(self._sp, self._sp_rank)
        keys = [
            1 if r is None or work.temperature == 0 else sequence_key(r.seed, r.before + r.decoded)
            for r in slots.active
        ]
        inputs = _pinned(torch.cat((columns, torch.tensor([keys]))), self._device)
        static.inputs.copy_(inputs, non_blocking=True)
        read = read_length(places, _GRAPH_MULTIPLE) if self._captures else read_length(places)
        length, tokens = min(read, static.cache.positions.shape[1]), int(columns[1].max()) + 1
        step(length, 0 if self._captures else tokens)

    def _step(self, static: _Static, work: Generate, length: int, tokens: int) -> None:
        """Decode one token of every slot, without the host: all that differs between steps of one length is `static`.

        length: of the cache that is read. tokens: of the longest sequence, where an indexer chooses keys.
        """
        token, position, place, own, keys_B = static.inputs
        token, group = token.where(token >= 0, static.chosen[0].long()), self._groups.get("sp")
        cached_here = None if group is None else own.bool()
        step = DecodeStep(static.cache, position, place, cached_here, length=length, group=group, tokens=tokens)
        hidden = self._forward(token.unsqueeze(1), position.unsqueeze(1), step)
        logits = self._logits(hidden[:, 0]) if self._last and self._sp_rank == 0 else None
        if logits is not None and self._samples:
            static.chosen[0], static.chosen[1] = sample(logits, keys_B, self._token_keys, work)
        # Broadcast from the rank that sampled, axis by axis, so that ranks cannot diverge.
        for axis, group in self._groups.items():
            dist.broadcast(static.chosen, group=group, group_src=group.size() - 1 if axis == "pp" else 0)

    def _read(self, slots: Slots, step: _Step, ended: Stops, turns: Turns | None, enough: Enough | None) -> None:
        """Give a step's tokens, once they are on the host, to the sequences that it was issued for, and the turns that
        are over to their environments; stop if what is over is `enough`."""
        issued, (chosen, copied), routed = step
        if copied is not None:
            copied.synchronize()
        ids, logprobs = chosen.tolist()
        for rollout, logprob in zip(issued, logprobs, strict=True):
            if rollout is not None and not rollout.stopped and logprob != logprob:
                tokens = len(rollout.prompt) + len(rollout.tokens)
                why = f"its weights, or its activations in {self._dtype}, are nan or infinite"
                raise RuntimeError(f"the model's logits are not finite after {tokens} tokens: {why}")
        for slot, rollout in enumerate(issued):
            if routed is not None and rollout is not None and not rollout.stopped:
                read = len(rollout.prompt) + len(rollout.tokens) - 1  # the position of the token that the step read
                rollout.routed.append((torch.tensor([read]), routed[slot : slot + 1]))
        over = slots.read(issued, list(map(int, ids)), logprobs, ended)
        if turns is not None:
            for rollout in over:
                turns.end_turn(rollout)
        if enough is not None:
            for rollout in over:
                if enough(rollout.number):
                    slots.stop()

    def _routed(self, rollout: Rollout) -> Tensor:
        """Return the experts that all tokens of a sequence chose, but the last one, which no forward has read: 0.
        Collective over sp and pp, whose ranks have some of the tokens and layers."""
        if self._recorder is None:
            return torch.zeros(0, dtype=torch.int16)
        whole = rollout.choices(self._recorder.width).to(self._device, torch.int32)
        for axis in ("sp", "pp"):
            if axis in self._groups:
                dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._groups[axis])
        return whole.cpu().to(torch.int16)

    def _forward(self, ids: Tensor, position_ids: Tensor, kv_cache: Prefill | DecodeStep) -> Tensor:
        """Return this stage's hidden states (rows, tokens, hidden); receive the previous stage's over the pp axis."""
        pp, x = self._groups.get("pp"), ids
        if not self._first:
            x = torch.empty(*ids.shape, self._model.config.hidden_size, dtype=self._dtype, device=self._device)
            _pass(dist.irecv, x, pp, -1)
        # In prefill tokens are divided over sp.
        axes = ("sp", "tp") if isinstance(kv_cache, DecodeStep) else ("tp",)
        groups = tuple(self._groups[axis] for axis in axes if axis in self._groups)
        with same_tokens(self._experts, groups) if self._experts else nullcontext():
            hidden = run_layers(self._model, x, first=self._first, position_ids=position_ids, kv_cache=kv_cache)
        if not self._last:
            _pass(dist.isend, hidden.contiguous(), pp, 1)
        return hidden

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """Return (B, V) logits. Collective over tp, which shards the vocabulary."""
        weight, bias = (local_tensor(x) for x in (self._head.weight, self._head.bias))
        logits = nn.functional.linear(hidden_BH, weight, bias)
        tp = self._groups.get("tp")
        if tp is not None:
            logits = gather_rows(logits, tp).unflatten(0, (tp.size(), -1)).movedim(0, 1).flatten(1)
        logits = logits.to(softmax_dtype(hidden_BH))
        self._transform.apply_(logits)
        return logits


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` in memory from which it can be copied without waiting for the device."""
    return x if device.type == "cpu" else x.pin_memory()


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for the device."""
    return _pinned(x, device).to(device, non_blocking=True)


def _pass(operation: Callable[..., Any], x: Tensor, pp: dist.ProcessGroup | None, by: int) -> None:
    """Send or receive `x` in the group's own communicator: NCCL makes another for each pair of single messages."""
    message = dist.P2POp(operation, x, group=pp, group_peer=dist.get_rank(pp) + by)
    for work in dist.batch_isend_irecv([message]):
        work.wait()


RolloutEngine: TypeAlias = Generator | VllmEngine


def generate_samples(prompts: Samples, work: Generate, seed: int, generator: RolloutEngine) -> Samples:
    """Generate `work.group_size` samples for each prompt p, with the ids p * group_size + k.

    Returns tokens (prompt and response), mask (1 where the policy wrote the next token), logprobs (of those tokens, at
    sampling), finished and prompt_length, and of episodes the score, turns and turn_rewards.
    A sample depends only on `seed` and its id, and on the environment.
    """
    group = range(work.group_size)
    ids = [prompt * work.group_size + k for prompt in prompts.ids for k in group]
    repeated = [prompt for prompt in prompts["prompt_ids"] for _ in group] if prompts.ids else []
    indices = [int(index) for index in prompts.values.get("prompt_index", ()) for _ in group]
    seeds, of_samples = [derived_seed(seed, sample) for sample in ids], list(zip(ids, indices, strict=False))
    responses = generator.generate(repeated, work, seeds, of_samples)
    samples = [sample_values(prompt, response) for prompt, response in zip(repeated, responses, strict=True)]
    return Samples(tuple(ids), {key: [sample[key] for sample in samples] for key in generated_keys(work)})


def sample_values(prompt: Tensor, response: GeneratedResponse) -> dict[str, Tensor]:
    """Return a sample's values by the keys of `GENERATED`."""
    prompt = prompt if response.prompt is None else response.prompt
    tokens = torch.cat((prompt.cpu(), response.tokens.cpu()))
    # Entry t is about token t + 1, so the first of the response belongs to the last token of the prompt.
    predicted = slice(len(prompt) - 1, len(tokens) - 1)
    mask, logprobs = torch.zeros(2, len(tokens))
    logprobs[predicted] = response.logprobs.float().cpu()
    turns, rewards = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(len(tokens))
    turns[predicted] = 1 if response.turns is None else response.turns
    mask[predicted] = (turns[predicted] > 0).float()
    versions = torch.zeros_like(turns)
    versions[predicted] = response.versions if len(response.versions) else 0
    for number, reward in enumerate(response.rewards, start=1):
        rewards[torch.nonzero(turns == number).max()] = reward
    return {
        "turns": turns,
        "turn_rewards": rewards,
        "tokens": tokens,
        "mask": mask,
        "logprobs": logprobs,
        "finished": torch.tensor(response.finished),
        "prompt_length": torch.tensor(len(prompt)),
        "score": torch.tensor(response.score),
        "versions": versions,
        ROUTED: response.routed.flatten(),
        BRANCHES: torch.zeros_like(tokens) if response.prompt is None else cast(Tensor, response.branches),
    }


def _model_violations(model: nn.Module, mesh: ParallelMesh, gathered: bool) -> list[str]:
    violations = []
    if not isinstance(getattr(model, "unified_sp", None), UnifiedSPAttention):
        violations.append("the model's attention is not sharded: call apply_unified_sp(model, mesh) first")
    else:
        masks = filter(None, (getattr(module, "unified_sp_mask", None) for module in model.modules()))
        violations += cache_problems({mask.kind for mask in masks})
    if not gathered and any(isinstance(module, FSDPModule) for module in model.modules()):
        violations.append("the weights are sharded with FSDP, which gathers them for every token: leave it out")
    if mesh.dims.ep > 1 and not all(hasattr(module, "ep_group") for module in expert_modules(model)):
        violations.append(f"ep={mesh.dims.ep} divides experts, and these are whole: call apply_ep(model, mesh) first")
    return violations
