"""A role's model computes and learns the same in every layout as in a single process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_config
from tests.usp.tiny import ADAM_EPS, CONFIGS, LEARNING_RATE, MAX_NORM, VOCAB, drawn_model
from usp.hf.experts import logits_index, router_modules
from usp.hf.export import save_weights
from usp.hf.integrate import decoder_layers
from usp.hf.models import load_model_config, scalar_config
from usp.optimizers import AdamW
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups
from usp.parallel.reallocation.boxes import local_box, local_part
from usp.rlhf.generation.decoding import GeneratedResponse
from usp.rlhf.generation.generate import generate_samples
from usp.rlhf.graph import Generate, Inference, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.roles.rows import pack_lengths
from usp.rlhf.samples import Samples, derived_seed
from usp.run.failures import TrainingDiverged

LENGTHS = [41, 1, 3, 19, 7, 2, 30, 5, 11, 23, 4, 13]
MINI_BATCHES = (range(6), range(6, 12))
TEMPERATURE, CLIP = 0.7, 0.2
ADAM = AdamW(0.1, eps=ADAM_EPS)  # keeps the first steps from amplifying rounding


@dataclass(frozen=True)
class Pairs:
    """A clipped policy loss with an entropy bonus, or a value loss, plus a loss on pairs of whole sequences."""

    head: Literal["logprobs", "values"] = "logprobs"
    keys: tuple[str, ...] = ("old", "advantages", "weights")
    counts: str = "weights"
    unit: int = 2
    temperature: float = TEMPERATURE

    @property
    def entropy(self) -> bool:
        return self.head == "logprobs"

    def __call__(self, output: Tensor, entropy: Tensor | None, given: Any, sequences: Any) -> Any:
        old, advantages, weights = (given[key] for key in self.keys)
        ratio = (output - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        if self.head == "values":
            loss = (output - advantages).square()
        if entropy is not None:
            loss = loss - 0.1 * entropy
        first, second = sequences.sums(output * (weights > 0)).view(-1, 2).unbind(1)
        pairs = sequences.share(-0.02 * torch.nn.functional.logsigmoid(first - second).sum())
        metrics = {"pairs": pairs.detach(), "away": (weights * (output - old)).sum().detach()}
        return (weights * loss).sum() + pairs, metrics


@dataclass(frozen=True)
class WholeSequences:
    """All sequences in one process, concatenated in one row."""

    lengths: list[int]

    def sums(self, x: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in x[0].split(self.lengths)])

    def share(self, loss: Tensor) -> Tensor:
        return loss


def all_samples() -> Samples:
    generator = torch.Generator().manual_seed(7)

    def draw(length: int) -> dict[str, Tensor]:
        normal = partial(torch.randn, length, generator=generator)
        counted = (torch.rand(length, generator=generator) < 0.7) * (torch.arange(length) < length - 1)
        return {
            "tokens": torch.randint(0, VOCAB, (length,), generator=generator),
            "old": 0.2 * normal() - 4.6,
            "advantages": normal(),
            "weights": counted / 40,
        }

    drawn = [draw(length) for length in LENGTHS]
    return Samples(tuple(range(len(LENGTHS))), {key: [values[key] for values in drawn] for key in drawn[0]})


def config_of(family: str, head: str) -> Any:
    config = CONFIGS[family]() if family in CONFIGS else tiny_config(family)
    return scalar_config(config) if head == "values" else config


# One plain process


def said(model: Any, tokens: Tensor, head: str) -> tuple[Tensor, Tensor | None]:
    """Return per token the log-probability of the next one and the entropy (0 at the last token), or the value."""
    hidden = model.base_model(input_ids=tokens.unsqueeze(0)).last_hidden_state[0]
    if head == "values":
        return model.score(hidden).squeeze(-1), None
    logs = torch.log_softmax(model.lm_head(hidden) / TEMPERATURE, dim=-1)[:-1]
    chosen = logs.gather(1, tokens[1:].unsqueeze(1)).squeeze(1)
    zero = torch.zeros(1)
    return torch.cat((chosen, zero)), torch.cat((-(logs.exp() * logs).sum(1), zero))


def train_alone(
    family: str, head: Literal["logprobs", "values"], balance: float = 0.0, row_tokens: int = 0
) -> dict[str, Any]:
    """Return the outputs before and after two steps, the metrics, and the weights.

    balance: weight of the experts' load-balancing loss; row_tokens: of each row of at most so many, not of the step.
    """
    model, samples, objective = drawn_model(config_of(family, head)), all_samples(), Pairs(head)
    logits: list[list[Tensor]] = []  # by router and sample
    for router in router_modules(model):
        logits.append([])
        router.register_forward_hook(lambda _, __, out, seen=logits[-1]: seen.append(out[logits_index(model)]))
    optimizer = ADAM.over(model.parameters())
    with torch.no_grad():
        before = [said(model, tokens, head)[0] for tokens in samples["tokens"]]
    history = []
    for ids in MINI_BATCHES:
        part = samples.of(ids)
        for seen in logits:
            seen.clear()
        outputs, entropies = zip(*(said(model, tokens, head) for tokens in part["tokens"]), strict=True)
        given = {key: torch.cat(list(part[key])).unsqueeze(0) for key in objective.keys}
        entropy = torch.cat(entropies).unsqueeze(0) if head == "logprobs" else None
        sequences = WholeSequences([len(tokens) for tokens in part["tokens"]])
        loss, metrics = objective(torch.cat(outputs).unsqueeze(0), entropy, given, sequences)
        rows = pack_lengths(part.ids, [*map(len, part["tokens"])], unit=2, budget=row_tokens) if balance else ()
        shares = [_balance_of([torch.cat([seen[i] for i in row]) for seen in logits], model.config) for row in rows]
        (loss + balance * sum(shares) / max(1, len(rows))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        optimizer.step()
        optimizer.zero_grad()
        history.append({**metrics, "loss": loss.detach(), "grad_norm": norm})
    with torch.no_grad():
        after = [said(model, tokens, head)[0] for tokens in samples["tokens"]]
    means = {name: float(sum(one[name] for one in history)) / len(history) for name in history[0]}
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return {"before": before, "after": after, "metrics": means, "weights": weights}


def _balance_of(logits: list[Tensor], config: Any) -> Tensor:
    loss = load_balancing_loss_func(tuple(logits), config.num_experts, config.num_experts_per_tok)
    assert isinstance(loss, Tensor)
    return loss


# On ranks


@dataclass(frozen=True)
class Case:
    """On 8 ranks; without --exhaustive on 4, with the degrees of `few`."""

    dims: ParallelDims
    few: ParallelDims | None = None
    zero: int = 0
    budget: int = 0
    shared: bool = False  # tp_sequence_parallel
    family: str = "llama"
    head: Literal["logprobs", "values"] = "logprobs"
    ac: str = "none"
    ac_offload: bool = False
    mlp_tile: int = 0
    offload: bool = False  # the optimizer, in a call for each mini-batch
    balance: float = 0.0
    router_balance: str = "step"
    ranks: int = 8

    @property
    def alone(self) -> tuple[Any, ...]:
        """The arguments of `train_alone`."""
        return self.family, self.head, self.balance, self.budget if self.router_balance == "micro-batch" else 0

    @property
    def layout(self) -> CallLayout:
        options = {"zero": self.zero, "micro_batch_tokens": self.budget, "tp_sequence_parallel": self.shared}
        options |= {name: getattr(self, name) for name in ("ac", "ac_offload", "mlp_tile")}
        return CallLayout(tuple(range(self.ranks)), self.dims.resolve(self.ranks), **options)  # type: ignore[arg-type]


DP4, U2_DP2 = ParallelDims(dp_shard=4), ParallelDims(ulysses=2, dp_shard=2)
PP2_R2, PP2_TP2 = ParallelDims(pp=2, ring=2), ParallelDims(pp=2, tp=2)
CASES = [
    Case(ParallelDims(dp_shard=8), DP4, zero=3, budget=16, ac="full", mlp_tile=3, offload=True),
    Case(ParallelDims(pp=2, ring=2, dp_shard=2), PP2_R2, budget=24, family="llama-tied", ac="full", ac_offload=True),
    Case(ParallelDims(tp=2, pp=2, ring=2), PP2_TP2, head="values", shared=True),
    Case(ParallelDims(ulysses=2, dp_shard=4), U2_DP2, zero=3, budget=24, family="mixtral", balance=0.5, ac="full"),
    Case(ParallelDims(pp=2, tp=2, ring=2), PP2_TP2, zero=1, shared=True, budget=30, family="mixtral", balance=0.5),
]
MORE = [
    Case(
        ParallelDims(ulysses=4, ring=2), zero=2, budget=40, family="mixtral", balance=0.5, router_balance="micro-batch"
    ),
    Case(ParallelDims(ulysses=2, ring=2, tp=2), budget=50),
    Case(ParallelDims(dp_replicate=2, dp_shard=1, ulysses=2, tp=2), zero=3, shared=True, budget=32),
    Case(ParallelDims(tp=2, pp=2, dp_shard=2), offload=True),
    Case(ParallelDims(ulysses=2, ring=2, dp_shard=2), zero=3, family="qwen3", ac="attention-saved"),
    Case(ParallelDims(ulysses=2, dp_shard=4), zero=3, head="values", budget=16),
]


def spec_of(case: Case) -> RoleSpec:
    config = config_of(case.family, case.head)
    training = {"optimizer": ADAM, "learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM}
    balancing = {"balance": case.balance, "router_balance": case.router_balance}
    return RoleSpec("actor", "tiny", config, **training, **balancing, loss_chunk=5)  # type: ignore[arg-type]


def own_part(samples: Samples, mesh: ParallelMesh) -> Samples:
    """Deal out pairs round-robin, none to one of every four data-parallel ranks."""
    size = mesh.size("batch")
    return samples.of([i for i in samples.ids if i // 2 % (size - size // 4) == mesh.rank("batch")])


def apart(found: Samples, wanted: list[Tensor], key: str) -> float:
    errors = [(value - wanted[i]).abs().max() for i, value in zip(found.ids, found.values.get(key, ()), strict=False)]
    return float(torch.stack(errors).amax()) if errors else 0.0


def weights_apart(model: RoleModel, wanted: dict[str, Tensor]) -> float:
    errors = []
    for name, weight in model.weights().items():
        errors.append((local_part(weight) - wanted[name][local_box(weight).slices()]).flatten().norm())
    return float(torch.stack(errors).amax())


def run_case(case: Case, wanted: dict[str, Any], groups: ProcessGroups) -> dict[str, float]:
    """Return the error of each result against the single process."""
    mesh = ParallelMesh.create(case.layout.dims, groups=groups)
    mine = own_part(all_samples(), mesh)
    work = Inference(case.head, TEMPERATURE)
    spec, found = spec_of(case), {}
    before, after = ([*wanted[when]] for when in ("before", "after"))
    still = RoleModel(spec, case.layout, mesh)
    still.fill()
    boxes = {name: local_box(weight) for name, weight in still.weights().items()}
    found["before"] = apart(still.inference(mine, work, "said"), before, "said")
    model = RoleModel(spec, case.layout, mesh, trained=True, offload_optimizer=case.offload)
    model.fill()
    found["before, trained"] = apart(said := model.inference(mine, work, "said"), before, "said")
    leads = mesh.rank("pp") == mesh.size("pp") - 1 and mesh.rank("sp") == mesh.rank("tp") == 0
    assert said.ids == (mine.ids if leads else ()) and set(said.values) == ({"said"} if leads else set())
    parts = [mine.of(own) if (own := [i for i in ids if i in mine.ids]) else Samples((), {}) for ids in MINI_BATCHES]
    calls = [[part] for part in parts] if case.offload else [parts]
    told = [model.train_step(call, TrainStep(Pairs(case.head), mini_batches=len(call))) for call in calls]
    metrics = {name: sum(one[name] for one in told) / len(told) for name in told[0]}
    assert metrics.pop("optimizer_steps") == len(parts) / len(told) and metrics.keys() == wanted["metrics"].keys()
    if case.offload:
        assert model.engine is not None and _moment_bytes(model) == {0}
        moments = [x for name, x in model.state().items() if "exp_avg" in name]  # on the device
        assert all(local_part(x).isfinite().all() for x in moments) and 0 not in _moment_bytes(model)
        model.offload_optimizer()
        assert _moment_bytes(model) == {0}
    found["metrics"] = float(
        torch.tensor([value - wanted["metrics"][name] for name, value in metrics.items()]).abs().amax()
    )
    found["weights"] = weights_apart(model, wanted["weights"])
    layers = [layer for layer in decoder_layers(model.stage.model) if next(layer.parameters(), None) is not None]
    assert {"forward" in vars(layer) for layer in layers} == {case.ac != "none"}
    assert {"forward" in vars(layer.mlp) for layer in layers} == {case.mlp_tile > 0}
    call = replace(case.layout, micro_batch_tokens=40, loss_chunk=3, ac="none", ac_offload=False)  # of its own
    found["after"] = apart(model.inference(mine, work, "said", call), after, "said")
    assert model.stage.loss_chunk == 3 and model.layout == case.layout
    masked = Samples(mine.ids, {"tokens": mine["tokens"], "mask": mine["weights"]}) if mine.ids else mine
    counted = after
    if case.head == "logprobs":
        counted = [x.where(weights != 0, 0) for x, weights in zip(after, all_samples()["weights"], strict=True)]
    found["after, masked"] = apart(model.inference(masked, work, "said"), counted, "said")
    assert {name: local_box(weight) for name, weight in still.weights().items()} == boxes, "parameters stay gathered"
    # Weights that are released, allocated, changed, offloaded and loaded.
    still.release()
    assert all(local_part(weight).untyped_storage().nbytes() == 0 for weight in still.weights().values())
    still.allocate()
    for name, weight in still.weights().items():
        local_part(weight).copy_(wanted["weights"][name][local_box(weight).slices()])
    still.offload()
    still.load()
    found["after, again"] = apart(still.inference(mine, work, "said"), after, "said")
    if case.zero == 0:
        alias = RoleModel(spec, case.layout, mesh)
        alias.share(model.weights())
        alias.release()
        found["after, shared"] = apart(alias.inference(mine, work, "said"), after, "said")
    if case.head == "values":
        scores = [value[-1] for value in wanted["after"]]
        found["scores"] = apart(still.inference(mine, Inference("score"), "score"), scores, "score")
    assert len(still.inference(Samples((), {}), work, "said")) == 0
    return found


def _moment_bytes(model: RoleModel) -> set[int]:
    assert model.engine is not None
    states = [kept[name] for kept in model.engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {local_part(x).untyped_storage().nbytes() for x in states if local_part(x).numel()}


def run_cases(chosen: list[Case], wanted: dict[tuple[Any, ...], Any]) -> list[dict[str, float]]:
    groups = ProcessGroups()
    return [run_case(case, wanted[case.alone], groups) for case in chosen]


def stop_and_fail(folder: str) -> list[Any]:
    """Stop a pipeline early, break it with bad data, then save a critic that starts from a causal LM's folder."""
    dims = ParallelDims(pp=2, dp_shard=2)
    layout, mesh = CallLayout(tuple(range(4)), dims, micro_batch_tokens=32), ParallelMesh.create(dims)
    spec = replace(spec_of(CASES[0]), source=folder, config=load_model_config(folder))
    model = RoleModel(spec, layout, mesh, trained=True)
    model.fill()
    mine = own_part(all_samples(), mesh)
    before = {name: local_part(weight).clone() for name, weight in model.weights().items()}

    def untouched() -> bool:
        return all(torch.equal(local_part(weight), before[name]) for name, weight in model.weights().items())

    parts = [mine.of([i for i in ids if i in mine.ids]) for ids in MINI_BATCHES]
    metrics = model.train_step(parts, TrainStep(Pairs(), mini_batches=2, epochs=3, stop_above=("pairs", 0.0)))
    found: list[Any] = [metrics["optimizer_steps"], metrics["pairs"] > 0, untouched()]
    with pytest.raises(ValueError, match="unknown metric kl: the objective's metrics are away, loss, pairs"):
        model.train_step(parts, TrainStep(Pairs(), mini_batches=2, stop_above=("kl", 0.1)))
    if mesh.rank("batch") == 0:
        mine["advantages"][0][3] = torch.nan
    with pytest.raises(TrainingDiverged, match=r"actor, epoch 1, mini-batch 1 of 2: \{'loss': nan\} must"):
        model.train_step(parts, TrainStep(Pairs(), mini_batches=2))
    found.append(untouched())
    with pytest.raises(ValueError, match="no samples on any rank"):
        model.train_step([mine.of([])], TrainStep(Pairs()))
    with pytest.raises(ValueError, match="actor cannot compute values, it has a causal LM head"):
        model.inference(mine, Inference("score"), "score")
    critic = replace(spec, config=load_model_config(folder, "scalar", new_head=True), new_head=True, seed=5)
    scalar = RoleModel(critic, layout, mesh)
    scalar.fill()
    save_weights(scalar.weights(), Path(f"{folder}-critic"), config=critic.config)
    return found


def test_early_stop_and_nan_change_nothing_and_critics_start_from_causal_lms(ranks: RankPool, tmp_path: Path) -> None:
    model = drawn_model(CONFIGS["llama"](), 3)
    save_weights(dict(model.named_parameters()), tmp_path / "lm", config=model.config)
    assert ranks.run(stop_and_fail, 4, str(tmp_path / "lm")) == [[0.0, True, True, True]] * 4
    folder = str(tmp_path / "lm-critic")
    critic = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    head = drawn_model(scalar_config(model.config), 5).score.weight
    wanted = {**dict(model.named_parameters()), "score.weight": head}
    assert critic.num_labels == 1 and wanted.keys() - dict(critic.named_parameters()).keys() == {"lm_head.weight"}
    assert all(torch.equal(weight, wanted[name]) for name, weight in critic.named_parameters())
    assert load_model_config(folder, "scalar").architectures == ["LlamaForSequenceClassification"]
    with pytest.raises(ValueError, match="has a scalar head: use the directory of a causal LM"):
        load_model_config(folder)
    with pytest.raises(ValueError, match="is a causal LM without a scalar head: request a new head"):
        load_model_config(str(tmp_path / "lm"), "scalar")


class Echo:
    """Responds to a prompt of n tokens with n - 1 times the seed."""

    def generate(self, prompts: Any, work: Generate, seeds: Any, samples: Any) -> list[GeneratedResponse]:
        lengths = [len(prompt) - 1 for prompt in prompts]
        return [
            GeneratedResponse(torch.full((n,), seed % 97), torch.full((n,), -0.5), n > 0)
            for n, seed in zip(lengths, seeds, strict=True)
        ]


def test_responses_are_samples_aligned_with_their_tokens() -> None:
    prompts = Samples((2, 5), {"prompt_ids": [torch.tensor([7, 8, 9]), torch.tensor([6])]})
    made = generate_samples(prompts, Generate(group_size=2), 11, Echo())
    assert made.ids == (4, 5, 10, 11)
    first, second = (derived_seed(11, sample) % 97 for sample in (4, 5))
    assert made["tokens"][0].tolist() == [7, 8, 9, first, first] and made["tokens"][1].tolist()[3:] == [second] * 2
    assert made["mask"][0].tolist() == [0, 0, 1, 1, 0] and made["logprobs"][0].tolist() == [0, 0, -0.5, -0.5, 0]
    assert made["mask"][2].tolist() == [0] and [bool(f) for f in made["finished"]] == [True, True, False, False]
    assert [int(n) for n in made["prompt_length"]] == [3, 3, 1, 1]
    assert first != second and len(generate_samples(Samples((), {}), Generate(), 11, Echo())) == 0


@pytest.mark.slow
def test_every_layout_matches_a_single_process(ranks: RankPool, exhaustive: bool) -> None:
    chosen = CASES + MORE if exhaustive else [replace(case, dims=case.few, ranks=4) for case in CASES]
    wanted = {case.alone: train_alone(*case.alone) for case in chosen}
    found = ranks.run(run_cases, chosen[0].ranks, chosen, wanted)
    for rank, cases in enumerate(found):
        for case, errors in zip(chosen, cases, strict=True):
            assert all(error <= 1e-5 for error in errors.values()), (rank, case, errors)
