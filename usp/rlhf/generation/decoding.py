"""Decoding: tokens from logits, the end of a response, and continuous batching.

    waiting --admit--> slot --prefill of all prompt tokens but the last--> decode steps --issue, read--> slot is free

The last prompt token is decoded like a generated one, so all sampling happens in decode steps. (Iteration-level
scheduling: Orca, Yu et al. 2022, section 3.1.) The noise of a token does not depend on layouts and batches. A step's
tokens are read after the next one has been issued, so that a device always has work: a sequence that ends before its
limit is decoded for one more token, which is dropped.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from usp.attention import SequenceLayout
from usp.rlhf.graph import Generate

Decode = Callable[[Iterable[int]], str]
Ended = Callable[[Sequence[int]], bool]  # whether a response ends with its last token

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# From |int64| to [0, 1), where float32 rounds nothing up to 1.
_UNIT = (1 - 2.0**-24) * 2.0**-63
_ROW_MULTIPLE = 16  # prompts are padded to a multiple of this, to limit the number of shapes
_CONTEXT = 8  # characters before a stop string that may depend on where decoding starts


def sequence_key(seed: int, number: int) -> int:
    """Return the key of token `number` of a sequence, an odd int64."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) | 1


def token_keys(vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the key of each token, odd int64 (V,): the output of SplitMix64 (Steele et al. 2014, figure 17)."""
    keys = torch.arange(1, vocabulary + 1, device=device) * _signed(_MULTIPLIERS[0])
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS[1:], 1), strict=True):
        keys ^= (keys >> shift) & ((1 << (64 - shift)) - 1)  # a logical shift
        keys *= _signed(multiplier)
    return keys | 1


def exponential(keys_B: Tensor, keys_V: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the noise of each token of each sequence, exponential with mean 1, (B, V) of `dtype`.

    The product of two keys modulo 2**64 is the same number everywhere; only the logarithm of it is rounded. For random
    keys of sequences, the products of any few tokens are independent unless a sum of small multiples of their keys is 0
    modulo 2**64. Small values, which win, have full relative precision.
    """
    product = keys_B.unsqueeze(1) * keys_V
    return product.to(dtype).abs_().mul_(-_UNIT).log1p_().neg_()


def sample(logits_BV: Tensor, keys_B: Tensor, keys_V: Tensor, work: Generate) -> tuple[Tensor, Tensor]:
    """Return the next tokens, int64 (B,), and their log-probabilities before top-k and top-p, float32 (B,).

    Logits that are not finite give a nan log-probability and an arbitrary token.

    Args:
        logits_BV: float32 or float64.
        keys_B: of `sequence_key`; unused at temperature 0, which takes the most likely token. keys_V: of `token_keys`.
    """
    if work.temperature == 0:
        logits = logits_BV.float()
        chosen_logit, tokens = logits.max(-1)
        return tokens, chosen_logit - logits.logsumexp(-1)
    if work.temperature != 1:
        # The largest becomes 0, as it does in softmax, so that dividing by a low temperature rounds little.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).div_(work.temperature)
    probs = logits_BV.softmax(-1)
    mass_B = probs.sum(-1, dtype=torch.float64)  # of a float32 softmax, 1 only up to the rounding of long sums
    noise = exponential(keys_B, keys_V, probs.dtype)
    race = torch.div(probabilities(probs, work.top_k, work.top_p), noise, out=noise)
    tokens_B1 = race.argmax(-1, keepdim=True)
    return tokens_B1.squeeze(1), (probs.gather(1, tokens_B1).squeeze(1) / mass_B).log().float()


def probabilities(probs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the probabilities, zero outside of the `top_k` most likely tokens and the nucleus; no longer normalized.

    The nucleus is the smallest set of most likely tokens with at least `top_p` of the mass after top-k (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration", section 3.1). Ties with the k-th token stay.
    """
    if 0 < top_k < probs_BV.shape[1]:
        lowest = probs_BV.topk(top_k).values[:, -1:]
        probs_BV = probs_BV.masked_fill(probs_BV < lowest, 0)
    if top_p < 1:
        ordered, order = probs_BV.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.double()
        likelier = ordered.cumsum(-1) - ordered
        outside = likelier >= top_p * ordered.sum(-1, keepdim=True)
        probs_BV = probs_BV.masked_fill(torch.empty_like(outside).scatter_(1, order, outside), 0)
    return probs_BV


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class Stops:
    """Decision whether a response has ended, by its tokens; every rank decides alike.

    decode: a tokenizer's; needed if `work.stop_strings` is not empty.
    """

    def __init__(self, work: Generate, decode: Decode | None) -> None:
        self._ids, self._strings, self._decode = frozenset(work.stop_ids), work.stop_strings, decode
        self._reach = max(map(len, self._strings), default=0) + _CONTEXT

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of `tokens` ends the response, which none of those before it did.

        It does if the text of all tokens contains a stop string. That text is decoded only where the text of the last
        tokens contains one, and these are as many as give the last token and the longest stop string before it.
        """
        if tokens[-1] in self._ids:
            return True
        if not self._strings or self._decode is None:
            return False
        length = self._reach
        while len(text := self._decode(tokens[-1 - length : -1])) < self._reach and length < len(tokens):
            length *= 2  # tokens without text, and parts of characters
        text = self._decode(tokens[-1 - length :])
        return self._found(text) and (length >= len(tokens) - 1 or self._found(self._decode(tokens)))

    def _found(self, text: str) -> bool:
        return any(string in text for string in self._strings)


def stop_problems(work: Generate, encode: Callable[[str], Iterable[int]], decode: Decode, vocabulary: int) -> list[str]:
    """Return why a response can never end with one of the stop ids or strings."""
    problems = [
        f"stop id {token} must be from 0 to {vocabulary - 1}, the model's vocabulary"
        for token in work.stop_ids
        if not 0 <= token < vocabulary
    ]
    for string in work.stop_strings:
        ids = list(map(int, encode(string)))
        if not string:
            problems.append("a stop string must not be empty")
        elif string not in decode(ids):
            listed = ",".join(map(str, ids))
            problems.append(f"stop string {string!r} is never in a decoded text: use the stop ids {listed}")
    return problems


@dataclass(frozen=True, eq=False)
class GeneratedResponse:
    """One generated response.

    routed: the experts that the tokens of prompt and response chose, (tokens, `Generate.routed`). versions: of partial
    rollouts, those of the weights that wrote each token. record: of an episode, its turns (`turns.EpisodeRecord`).
    """

    tokens: Tensor  # int64, on the CPU
    logprobs: Tensor  # float32, of each token at the temperature (1 where it is 0), before top-k and top-p
    finished: bool  # whether it ends with a stop id, or the token that completes a stop string
    turns: Tensor | None = None  # int64, the turn that wrote each token, from 1; 0: an environment's; None: all are 1
    score: float = 0.0  # of an episode
    rewards: Sequence[float] = ()  # of its turns
    complete: bool = True  # False if generation stopped before its end
    routed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int16))
    versions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    prompt: Tensor | None = None  # int64, what an agent asked first, instead of the data's
    branches: Tensor | None = None  # int64, the conversation of each token of the prompt and the response; None: one
    record: Any = None


@dataclass(eq=False)
class Rollout:
    """A prompt and its response so far, or a turn of it.

    Attributes:
        limit: maximum tokens in the response.
        number: of the response. before: tokens of the response that are in the prompt, with those of an environment.
        known: the first tokens, which an earlier call wrote, so that they are read as the prompt is. versions: of the
            weights that wrote the tokens of earlier calls.
        cached: `given` tokens in this rank's cache. most_cached: in that of any rank, at most.
        unread: tokens after these that decode steps have been issued for.
        routed: positions, and the experts that their tokens chose in this rank's layers; with `Generate.routed`.
    """

    prompt: list[int]
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    most_cached: int = 0
    unread: int = 0
    stopped: bool = False
    number: int = 0
    before: int = 0
    known: int = 0
    versions: list[int] = field(default_factory=list)
    routed: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def begin(
        prompts: Sequence[Tensor], work: Generate, seeds: Sequence[int], begun: Sequence[Any] | None, context: int
    ) -> list[Rollout]:
        """Return the rollouts of prompts in a context of that many tokens; see `Generator.generate`."""
        rollouts = []
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            limit = min(work.max_new_tokens, context - len(prompt))
            tokens, logprobs = (begun[number].tokens.tolist(), begun[number].logprobs.tolist()) if begun else ([], [])
            rollout = Rollout(prompt.tolist(), seed, limit, tokens, logprobs, number=number, known=len(tokens))
            rollouts.append(rollout)
        return rollouts

    def again(self, number: int) -> Rollout:
        """Return a copy that goes on as the response `number` of another call."""
        new: Any = {name: [*getattr(self, name)] for name in ("tokens", "logprobs", "versions")}
        new |= {"number": number, "known": len(self.tokens), "routed": []}
        return replace(self, **new, cached=0, most_cached=0, unread=0)

    @property
    def given(self) -> list[int]:
        """All tokens that are read before the first one that is decoded."""
        return [*self.prompt, *self.tokens[: self.known]] if self.known else self.prompt

    @property
    def decoded(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def done(self) -> bool:
        return self.stopped or self.decoded == self.limit

    def take(self, token: int, logprob: float, ended: Ended) -> bool:
        """Append a token that was decoded; return whether it is the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = ended(self.tokens)
        return self.stopped or len(self.tokens) == self.limit

    def choices(self, width: int) -> Tensor:
        """Return the experts in `routed`, int16 (tokens of prompt and response, width); 0 where there are none."""
        whole = torch.zeros(len(self.prompt) + len(self.tokens), width, dtype=torch.int16)
        for positions, chosen in self.routed:
            whole[positions] = chosen
        return whole

    def response(self, routed: Tensor) -> GeneratedResponse:
        """Return what has been decoded; routed: the experts of its tokens."""
        tokens, logprobs = torch.tensor(self.tokens, dtype=torch.int64), torch.tensor(self.logprobs).float()
        return GeneratedResponse(tokens, logprobs, self.stopped, complete=self.done, routed=routed)


@dataclass(frozen=True)
class PrefillGroup:
    """Sequences to prefill in one forward."""

    slots: tuple[int, ...]
    rows: tuple[int, ...]  # slots[i] is filled from row rows[i]; equal prompts share a row
    prompts: tuple[Sequence[int], ...]  # of each row
    padded: int  # tokens in each row, including padding


class Slots:
    """The active sequences, at most `slots`, and the waiting ones. first: those of `rollouts`, all without it."""

    def __init__(self, rollouts: Sequence[Rollout], slots: int, first: Sequence[Rollout] | None = None) -> None:
        # Sorted, so that prompts of similar length are prefilled together and equal prompts are adjacent.
        waiting = rollouts if first is None else first
        self._waiting = deque(sorted(waiting, key=lambda each: (not each.known, -len(each.given), each.given)))
        self.active: list[Rollout | None] = [None] * min(slots, len(rollouts))

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or any(self.active)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Admit further rollouts before those that wait."""
        self._waiting.extendleft(rollouts)

    def stop(self) -> None:
        """Leave all sequences as they are; tokens that were issued can still be read."""
        self._waiting.clear()
        self.active = [None] * len(self.active)

    def admit(self) -> list[int]:
        """Fill free slots; return them."""
        free = [slot for slot, rollout in enumerate(self.active) if rollout is None][: len(self._waiting)]
        for slot in free:
            self.active[slot] = self._waiting.popleft()
        return free

    def prefill_groups(self, slots: Sequence[int], multiple: int, max_tokens: int) -> list[PrefillGroup]:
        """Group newly admitted slots for prefill, longest prompts first.

        A row is padded to a multiple of `multiple`, plus at most a third to match the longest row. A group has at most
        `max_tokens` tokens, unless a single row is longer.
        """
        groups: list[PrefillGroup] = []
        admitted = [(slot, rollout) for slot in slots if (rollout := self.active[slot])]
        for slot, rollout in sorted(admitted, key=lambda pair: -len(pair[1].given)):
            prompt = rollout.given[:-1]
            if not prompt:
                continue
            padded = -(-len(prompt) // multiple) * multiple
            last = groups[-1] if groups else None
            if last is not None and prompt == last.prompts[-1]:
                groups[-1] = PrefillGroup((*last.slots, slot), (*last.rows, last.rows[-1]), last.prompts, last.padded)
            elif last and 4 * padded >= 3 * last.padded and (len(last.prompts) + 1) * last.padded <= max_tokens:
                rows = (*last.rows, len(last.prompts))
                groups[-1] = PrefillGroup((*last.slots, slot), rows, (*last.prompts, prompt), last.padded)
            else:
                groups.append(PrefillGroup((slot,), (0,), (prompt,), padded))
        return groups

    def decode_inputs(self, ranks: int, rank: int) -> tuple[Tensor, int]:
        """Return the inputs of the next decode step. The n-th decoded token is cached on rank n % ranks.

        Returns:
            int64 (4, slots): token, or -1 for that of the step before; position; place in this rank's cache; whether
            this rank caches it; zeros for empty slots. And the most places in use in any rank's cache, with this
            step's: all ranks read as many.
        """
        columns, length = [], 1
        for rollout in self.active:
            if rollout is None:
                columns.append((0, 0, 0, ranks == 1))
                continue
            decoded = rollout.decoded
            token = -1 if rollout.unread else (rollout.tokens or rollout.prompt)[-1]
            new = decoded - rollout.known
            place, own = rollout.cached + new // ranks, new % ranks == rank
            columns.append((token, len(rollout.prompt) - 1 + decoded, place, own))
            length = max(length, rollout.most_cached + new // ranks + 1)
        return torch.tensor(columns).T, length

    def issue(self) -> tuple[Rollout | None, ...]:
        """Count a token of each slot that is yet to be read; free the slots of sequences at their limit."""
        issued = tuple(self.active)
        for slot, rollout in enumerate(issued):
            if rollout is not None:
                rollout.unread += 1
                self.active[slot] = None if rollout.done else rollout
        return issued

    def read(
        self, issued: Sequence[Rollout | None], tokens: Sequence[int], logprobs: Sequence[float], ended: Ended
    ) -> list[Rollout]:
        """Append a step's tokens to those of `issue` that have not ended; free the slots of those that do now, and
        return these."""
        over = []
        for slot, rollout in enumerate(issued):
            if rollout is None or rollout.stopped:
                continue
            rollout.unread -= 1
            if rollout.take(tokens[slot], logprobs[slot], ended):
                over.append(rollout)
            if rollout.stopped and self.active[slot] is rollout:
                self.active[slot] = None
        return over


def row_multiple(layout: str, ring: int, ulysses: int) -> int:
    """Return what prompts are padded to a multiple of, in a `SequenceLayout` of this name."""
    multiple = SequenceLayout.multiple_of(layout, ring, ulysses)
    return multiple * -(-_ROW_MULTIPLE // multiple)


def read_length(places: int, multiple: int = 64) -> int:
    """Return how many places of a cache a step reads where so many are in use: rounded up to a multiple, and further to
    one of eight lengths between powers of two, to limit the number of shapes."""
    multiple = max(multiple, (1 << (places - 1).bit_length()) // 16)
    return -(-places // multiple) * multiple


def fitting_slots(slots: int, cache_tokens: int, places: int, ranks: int) -> int:
    """Return how many sequences are decoded at a time: at most `slots`, with `places` on each of the ranks that share
    them, and no more in all than `cache_tokens`; 0 for no bound."""
    return min(slots, cache_tokens // (places * ranks)) if cache_tokens and places else slots


def cache_violation(cache_tokens: int, places: int, ranks: int, flag: str = "cache_tokens") -> str:
    """Return why a cache of so many tokens, 0 for no bound, is too small for a sequence; empty if it is not."""
    if not cache_tokens or places * ranks <= cache_tokens:
        return ""
    needed = f"the longest prompt, padded, and its response need {places * ranks} tokens"
    return f"{flag} = {cache_tokens} holds no sequence: {needed}; use at least so many, or fewer new tokens"


def capacity(rollouts: Sequence[Rollout], ranks: int, multiple: int) -> int:
    """Return the cache places per slot and rank that fit any of the sequences. `ranks` divides `multiple`."""
    # Rows are as long as the longest prompt of their group, and in a contiguous layout one rank may then hold all of a
    # shorter prompt, so a sequence's own share is not a bound. One that goes on has a long prompt, and a low limit.
    padded = [-(-(len(rollout.prompt) + rollout.known - 1) // multiple) * multiple for rollout in rollouts]
    most = max(padded) // ranks
    pairs = zip(padded, rollouts, strict=True)
    return max(most, *(min(tokens, most) + -(-(each.limit - each.known) // ranks) for tokens, each in pairs))
