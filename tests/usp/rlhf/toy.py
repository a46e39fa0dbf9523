"""A PPO step on models small enough to write down: token -> tanh(E[token] A) B, as logits or as a value.

`ToyModel` is a role on a mesh: A is divided by columns and B by rows over tp, E and A are stage 0 and B stage 1, and
all of them are sharded over fsdp with ZeRO-3. `Alone` is the same step in one process, without an executor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from usp.parallel import ParallelMesh
from usp.rlhf.graph import Compute, DataflowGraph, Generate, Inference, ModelCall, Reduce, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.samples import Samples

VOCABULARY, HIDDEN, RATE = 12, 8, 0.5
STAGE = {"E": 0, "A": 0, "B": 1}


@dataclass(frozen=True)
class Toward:
    """The objective of the toy: of the actor, sum of -advantage * logprob; of the critic, of squared errors."""

    head: str
    unit: int = 1


def ppo(mini_batches: int = 2, group_size: int = 2, temperature: float = 1.0) -> DataflowGraph:
    generate = Generate(group_size=group_size, max_new_tokens=5, temperature=temperature, stop_ids=(0,))
    actor, critic = (TrainStep(Toward(head), mini_batches) for head in ("logprobs", "values"))  # type: ignore[arg-type]
    per_token = ("tokens", "mask")
    return DataflowGraph(
        (
            ModelCall("actor_train", "actor", actor, (*per_token, "advantages")),
            ModelCall("critic_train", "critic", critic, (*per_token, "returns")),
            ModelCall("advantages", "", Compute(advantages), ADVANTAGES, ("advantages", "returns")),
            ModelCall("ref_inference", "ref", Inference("logprobs"), ("tokens",), ("ref_logprobs",)),
            ModelCall("reward_inference", "reward", Inference("score"), ("tokens",), ("score",)),
            ModelCall("critic_inference", "critic", Inference("values"), ("tokens",), ("values",)),
            ModelCall("actor_inference", "actor", Inference("logprobs"), ("tokens",), ("old_logprobs",)),
            ModelCall("actor_generate", "actor", generate, ("prompt_ids",), (*per_token, "logprobs", "finished")),
        ),
        ("prompt_ids",),
    )


ADVANTAGES = ("mask", "score", "values", "old_logprobs", "ref_logprobs")


def advantages(samples: Samples, reduce: Reduce) -> Samples:
    """Scores and log-ratios against values, less the mean over the whole step."""
    returns, found = [], []
    for mask, score, values, old, ref in zip(*(samples[key] for key in ADVANTAGES), strict=True):
        returns.append((score - 0.1 * (old - ref)) * mask)
        found.append(returns[-1] - values * mask)
    sums = torch.tensor([sum(float(x.sum()) for x in found), sum(float(m.sum()) for m in samples["mask"])])
    total, tokens = reduce(sums.double())
    scaled = [(x - (total / tokens).float()) * mask for x, mask in zip(found, samples["mask"], strict=True)]
    return Samples(samples.ids, {"advantages": scaled, "returns": returns})


def prompts(number: int, step: int) -> Samples:
    random = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(1, 9, (number,), generator=random).tolist()
    ids = [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]
    return Samples(tuple(range(number)), {"prompt_ids": ids})


def initial(role: str) -> dict[str, Tensor]:
    """A role's weights; ref begins as the actor."""
    random = torch.Generator().manual_seed({"actor": 1, "ref": 1, "critic": 2, "reward": 3}[role])
    outputs = VOCABULARY if role in ("actor", "ref") else 1
    shapes = {"E": (VOCABULARY, HIDDEN), "A": (HIDDEN, HIDDEN), "B": (HIDDEN, outputs)}
    return {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each next token; 0 for the last."""
    chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen, chosen.new_zeros(1)])


def loss_of(work: TrainStep, logits: Tensor, sample: Mapping[str, Tensor], own: Tensor) -> Tensor:
    """The sum over the tokens that `own` names."""
    mask = sample["mask"] * own
    if work.objective.head == "logprobs":
        return -(mask * sample["advantages"] * logprobs_of(logits, sample["tokens"])).sum()
    return (mask * (logits[:, 0] - sample["returns"]) ** 2).sum()


def next_token(logits: Tensor, work: Generate, seed: int, sample: int, number: int) -> int:
    if not work.temperature:
        return int(logits.argmax())
    random = torch.Generator().manual_seed(hash((seed, sample, number)) % (1 << 62))
    noise = -torch.empty_like(logits).exponential_(generator=random).log()
    return int((logits / work.temperature + noise).argmax())


class ToyModel:
    """A role on a mesh. Without memory its weights are nan, unless `stale`: then they stay as they were."""

    def __init__(self, call: ModelCall, layout: CallLayout, mesh: ParallelMesh, stale: bool = False) -> None:
        self.call, self.layout, self.mesh, self._stale = call, layout, mesh, stale
        self._at_hand = False
        view = mesh.parameter_mesh("fsdp", "tp")
        zero = Shard(0) if layout.zero == 3 else Replicate()
        divided = {"E": Replicate(), "A": Shard(1), "B": Shard(0)}
        self._weights = {
            name: distribute_tensor(value, view, [zero, divided[name]])
            for name, value in initial(call.role).items()
            if mesh.dims.pp == 1 or STAGE[name] == mesh.rank("pp")
        }

        if not stale:
            self._forget()

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def fill(self) -> None:
        self.allocate()
        for name, value in self._weights.items():
            whole = distribute_tensor(initial(self.call.role)[name], value.device_mesh, value.placements)
            value.to_local().copy_(whole.to_local())

    def allocate(self) -> None:
        assert not self._at_hand
        self._at_hand = True

    def release(self) -> None:
        assert self._at_hand
        self._at_hand = False
        if not self._stale:
            self._forget()

    def _forget(self) -> None:
        for value in self._weights.values():
            value.to_local().fill_(torch.nan)

    def load(self) -> None:
        self.allocate()

    def offload(self) -> None:
        assert self._at_hand
        self._at_hand = False

    def full(self) -> dict[str, Tensor]:
        """The whole weights on every rank."""
        assert self._at_hand
        values: dict[str, Tensor] = {}
        for name, value in initial(self.call.role).items():
            whole = self._weights[name].full_tensor() if name in self._weights else torch.empty_like(value)
            if self.mesh.dims.pp > 1:
                whole = whole.contiguous()
                dist.broadcast(whole, group_src=STAGE[name], group=self.mesh.group("pp"))
            values[name] = whole
        return values

    def _forward(self) -> Callable[[Tensor], Tensor]:
        """tokens -> logits, the same on every rank of the data-parallel group."""
        if not self.layout.zero:
            return self._logits
        full = self.full()  # once: data-parallel ranks have different numbers of samples
        return lambda tokens: (full["E"][tokens] @ full["A"]).tanh() @ full["B"]

    def _logits(self, tokens: Tensor) -> Tensor:
        """By columns of A and rows of B, through the stages."""
        assert self._at_hand
        local = {name: value.to_local() for name, value in self._weights.items()}
        width = HIDDEN // self.mesh.dims.tp
        hidden = torch.empty(len(tokens), width, dtype=torch.float64)
        if "A" in local:
            hidden = (local["E"][tokens] @ local["A"]).tanh()
        if self.mesh.dims.pp > 1:
            dist.broadcast(hidden, group_src=0, group=self.mesh.group("pp"))
        outputs = initial(self.call.role)["B"].shape[1]
        logits = hidden @ local["B"] if "B" in local else torch.zeros(len(tokens), outputs, dtype=torch.float64)
        if self.mesh.dims.tp > 1:
            dist.all_reduce(logits, group=self.mesh.group("tp"))
        if self.mesh.dims.pp > 1:
            dist.broadcast(logits, group_src=1, group=self.mesh.group("pp"))
        return logits

    def _leads(self) -> bool:
        return dist.get_rank() in self.layout.leaders

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        assert self.call.kind == "generate"  # not on the trained copy
        logits_of = self._forward()
        made = {
            prompt * work.group_size + k: respond(logits_of, ids, work, seed, prompt * work.group_size + k)
            for prompt, ids in zip(prompts.ids, prompts["prompt_ids"], strict=True)
            for k in range(work.group_size)
        }
        if not self._leads():
            return Samples((), {})
        keys = ("tokens", "mask", "logprobs", "finished")
        return Samples(tuple(made), {key: [values[key] for values in made.values()] for key in keys})

    def inference(self, samples: Samples, work: Inference, output: str, layout: CallLayout | None = None) -> Samples:
        logits_of = self._forward()
        found = [infer(logits_of(tokens), tokens, work) for tokens in samples["tokens"]]
        return Samples(samples.ids, {output: found}) if self._leads() else Samples((), {})

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> dict[str, float]:
        losses = [self._step(samples, work) for samples in mini_batches]
        return {"loss": sum(losses) / len(losses)}

    def _step(self, samples: Samples, work: TrainStep) -> float:
        full = {name: value.requires_grad_() for name, value in self.full().items()}
        tokens = torch.tensor(float(sum(float(mask.sum()) for mask in samples["mask"])), dtype=torch.float64)
        loss = sum((value.sum() * 0 for value in full.values()), torch.zeros((), dtype=torch.float64))
        for number in range(len(samples)):
            sample = {key: values[number] for key, values in samples.values.items()}
            logits = (full["E"][sample["tokens"]] @ full["A"]).tanh() @ full["B"]
            own = torch.arange(len(logits)) % self.mesh.dims.sp == self.mesh.rank("sp")
            loss = loss + loss_of(work, logits, sample, own)
        dist.all_reduce(tokens, group=self.mesh.group("batch"))
        loss = loss / tokens
        loss.backward()
        for name, value in full.items():
            assert value.grad is not None
            dist.all_reduce(value.grad, group=self.mesh.group("loss"))
            if name in self._weights:
                mine = self._weights[name]
                grad = distribute_tensor(value.grad, mine.device_mesh, mine.placements)
                mine.to_local().sub_(RATE * grad.to_local())
        summed = loss.detach().clone()
        dist.all_reduce(summed, group=self.mesh.group("loss"))
        return float(summed)


class SharingModel(ToyModel, RoleModel):
    """A toy whose weights can be another's."""

    def frozen(self) -> Mapping[str, Tensor]:
        return {}

    def share(self, weights: Mapping[str, Tensor]) -> None:
        assert all(isinstance(value, DTensor) for value in weights.values())
        assert not (self.layout.zero or self._at_hand)
        self._weights, self._at_hand = dict(weights), True  # type: ignore[arg-type]


def respond(logits_of, prompt: Tensor, work: Generate, seed: int, sample: int) -> dict[str, Tensor]:
    tokens, finished = prompt, False
    chosen: list[Tensor] = []
    while len(chosen) < work.max_new_tokens and not finished:
        logits = logits_of(tokens[-1:])[0]
        token = next_token(logits, work, seed, sample, len(chosen))
        chosen.append((logits / (work.temperature or 1.0)).log_softmax(-1)[token])
        tokens, finished = torch.cat([tokens, torch.tensor([token])]), token in work.stop_ids
    logprobs, mask = torch.zeros(len(tokens)), torch.zeros(len(tokens))
    place = slice(len(prompt) - 1, len(tokens) - 1)
    logprobs[place], mask[place] = torch.stack(chosen).float(), 1.0
    return {"tokens": tokens, "mask": mask, "logprobs": logprobs, "finished": torch.tensor(finished)}


def infer(logits: Tensor, tokens: Tensor, work: Inference) -> Tensor:
    if work.head == "logprobs":
        return logprobs_of(logits, tokens).float()
    return logits[:, 0].float() if work.head == "values" else logits[-1, 0].float()


class Alone:
    """The step in one process."""

    def __init__(self) -> None:
        self.weights = {role: initial(role) for role in ("actor", "critic", "ref", "reward")}
        self.seeds: list[int] = []

    def _logits(self, role: str, tokens: Tensor) -> Tensor:
        weights = self.weights[role]
        return (weights["E"][tokens] @ weights["A"]).tanh() @ weights["B"]

    def step(self, graph: DataflowGraph, given: Samples, seed: int) -> tuple[dict[str, float], dict[str, list[Tensor]]]:
        values = self.roll_out(graph, given, seed)
        return self.train(graph, values), values

    def roll_out(self, graph: DataflowGraph, given: Samples, seed: int) -> dict[str, list[Tensor]]:
        work = graph["actor_generate"].work
        assert isinstance(work, Generate)
        group = work.group_size
        made = [
            respond(lambda t: self._logits("actor", t), given["prompt_ids"][i // group], work, seed, i)
            for i in range(len(given) * group)
        ]
        values: dict[str, list[Tensor]] = {key: [one[key] for one in made] for key in made[0]}
        for role, head, key in (
            ("ref", "logprobs", "ref_logprobs"),
            ("actor", "logprobs", "old_logprobs"),
            ("critic", "values", "values"),
            ("reward", "score", "score"),
        ):
            values[key] = [infer(self._logits(role, t), t, Inference(head)) for t in values["tokens"]]  # type: ignore[arg-type]
        values |= advantages(Samples(tuple(range(len(made))), values), lambda x: x).values  # type: ignore[arg-type]
        return values

    def train(self, graph: DataflowGraph, values: dict[str, list[Tensor]]) -> dict[str, float]:
        trains = {role: graph[f"{role}_train"].work for role in ("actor", "critic")}
        metrics = {f"{role}/loss": self._train(role, work, values) for role, work in trains.items()}
        metrics["score"] = float(torch.stack(values["score"]).double().mean())
        metrics["finished"] = float(torch.stack(values["finished"]).double().mean())
        return metrics

    def _train(self, role: str, work: object, values: Mapping[str, Sequence[Tensor]]) -> float:
        assert isinstance(work, TrainStep)
        number, losses = len(values["tokens"]), []
        for m in range(work.mini_batches):
            weights = {name: value.requires_grad_() for name, value in self.weights[role].items()}
            ids = range(m * number // work.mini_batches, (m + 1) * number // work.mini_batches)
            samples = [{key: of_key[i] for key, of_key in values.items()} for i in ids]
            losses_of = [loss_of(work, self._logits(role, s["tokens"]), s, torch.tensor(1.0)) for s in samples]
            loss = torch.stack(losses_of).sum() / sum(float(s["mask"].sum()) for s in samples)
            grads = torch.autograd.grad(loss, list(weights.values()))
            self.weights[role] = {
                name: (value - RATE * grad).detach() for (name, value), grad in zip(weights.items(), grads, strict=True)
            }
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)
