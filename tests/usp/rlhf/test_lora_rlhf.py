"""RLHF with LoRA: every plan trains the adapters that peft trains in one process, and moves and saves nothing else."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.rlhf.roles.test_role_model import ADAM, WholeSequences
from tests.usp.rlhf.test_numerics import ALGORITHMS, SAMPLING, alone, distance, given, move_those_of_the_first_step
from tests.usp.tiny import CONFIGS, drawn_model
from usp.fields import AUTO_RATE
from usp.hf import lora as adapters
from usp.hf.export import save_weights
from usp.hf.lora import Lora, adapter_parameters, initialise_adapters, lora_config, lora_targets
from usp.hf.models import load_model_config, scalar_config
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups, Reallocation, local_tensor
from usp.parallel.wire import SentBytes
from usp.rlhf.algorithms.algorithm import Options
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.config import RlhfConfig
from usp.rlhf.graph import DataflowGraph, ModelCall
from usp.rlhf.plan.named_plans import Facts, flattening, heuristic, interleaving, policy_as_reference, separation
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.prepare import prepare
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.trainer import RlhfTrainer
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, StopRequest
from usp.run.watchdog import Watchdog
from usp.train.checkpoints import CHECKPOINTS
from usp.train.engine import Engine

FAMILY, RATE, STEPS, TOLERANCE = "llama-4kv", 2e-2, 2, 1e-5
ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
LORA = Lora(rank=4, alpha=12, targets=ALL)
RANKS = 4
SHOWN = ("tokens", "old_logprobs", "ref_logprobs", "advantages", "weights", "token_weights")
SPLIT = "generate tp2, train r2"
CHOSEN = ("flattening", "zero 0", "separation")
PLANS = (*CHOSEN, SPLIT, "tp2 pp2", "interleaving", "heuristic", "u2 tp2")
GRPO = replace(ALGORITHMS["grpo"], kl=0.2, generate=replace(SAMPLING, group_size=2))
OTHERS = {
    "ppo": ALGORITHMS["ppo"],
    "dpo": ALGORITHMS["dpo"],
    "remax": ALGORITHMS["remax"],
    "sft": Options(mini_batches=2),
}


def plan_of(name: str, graph: DataflowGraph, ranks: int = RANKS) -> ExecutionPlan:
    facts = Facts(ranks, 2, 4, 2)
    if name == "alone":
        return alone(graph)
    if name == "flattening":
        return flattening(graph, replace(facts, dims=ParallelDims(ulysses=2), zero=3))
    if name == "zero 0":
        return flattening(graph, replace(facts, dims=ParallelDims(ring=2)))
    if name == "tp2 pp2":
        return flattening(graph, replace(facts, dims=ParallelDims(tp=2, pp=2)))
    if name == "u2 tp2":
        return flattening(graph, replace(facts, dims=ParallelDims(ulysses=2, tp=2), zero=1))
    if name == "separation":
        dims, rollout_dims = ParallelDims(ring=2), ParallelDims(tp=2)
        return separation(graph, replace(facts, dims=dims, rollout_dims=rollout_dims, zero=3))
    if name == "separation without tp":
        return separation(graph, replace(facts, dims=ParallelDims(ulysses=2), rollout_dims=ParallelDims(ring=2)))
    if name == "interleaving":
        return interleaving(graph, replace(facts, dims=ParallelDims(ulysses=2), zero=2))
    if name == "heuristic":
        return heuristic(graph, facts)
    assert name == SPLIT
    plan = flattening(graph, replace(facts, dims=ParallelDims(ring=2), zero=3))
    rollout = CallLayout(tuple(range(ranks)), ParallelDims(tp=2).resolve(ranks))
    made = {call.name: rollout for call in graph.calls if call.kind == "generate"}
    return replace(plan, calls={**plan.calls, **made})


@dataclass
class Run:
    """What a rank saw of a run.

    Attributes:
        told: metrics and samples of each step, on rank 0.
        adapters: the trained ones, whole.
        moved: bytes of each step's reallocations: sent, lacking, and counted on the wire.
        lacking: bytes of adapters on this rank in the copies that are filled by reallocation.
        roles: of the copies that this rank holds.
        shared: of a generating copy beside the trained one: whether its base is in the same memory.
        state: bytes of what a checkpoint holds.
    """

    told: list[tuple[dict[str, float], dict[str, list[Tensor]]]]
    adapters: dict[str, Tensor]
    moved: list[tuple[int, int, int]]
    lacking: int
    roles: list[str]
    shared: list[bool]
    state: int


def run(
    folder: Path,
    plan_name: str,
    groups: ProcessGroups,
    algorithm: str = "grpo",
    options: Any = GRPO,
    dtype: torch.dtype = torch.float32,
) -> Run:
    graph = build_graph(algorithm, options)
    graph, plan = policy_as_reference(graph, plan_of(plan_name, graph, dist.get_world_size()))
    trained: dict[str, RoleModel] = {}

    def build(call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        config, scalar = load_model_config(str(folder)), call.role in ("critic", "reward")
        spec = RoleSpec(
            call.role,
            str(folder),
            scalar_config(config) if scalar else config,
            new_head=scalar,
            dtype=dtype,
            optimizer=ADAM,
            learning_rate=RATE,
            loss_chunk=5,
            lora=replace(LORA, targets=lora_targets(config, "all-linear")) if call.role == "actor" else None,
        )

        model = RoleModel(spec, layout, mesh, trained=call.kind == "train_step", slots=5)
        if model.trained:
            trained[call.role] = model
        return model

    keys = {*graph.given, *graph.producers}
    shown = tuple(key for key in SHOWN if key in keys)
    made = Executor(graph, plan, CopyOptions(groups, build, torch.device("cpu"), 2), collect=shown)
    told, moved = [], []
    for number in range(1, STEPS + 1):
        wire: Counter[str] = Counter()
        with patch.object(Reallocation, "run", counted(Reallocation.run, wire)):
            result = made.run_step(given("dpo" if algorithm == "sft" else algorithm, number), number, seed=number)
        events = [event for event in result.events if event.kind == "reallocate"]
        moved.append((sum(e.sent for e in events), sum(e.minimum for e in events), wire["bytes"]))
        if result.samples is not None:
            told.append((result.metrics, {key: list(result.samples[key]) for key in shown}))
    actor, models = trained.get("actor"), made.copies._models
    filled = {copy for copy, _ in made.copies._reallocations}
    copies = [model for copy, model in models.items() if copy in filled and copy.role == "actor"]
    held: list[Any] = [model.weights() for model in copies]
    assert not any(in_memory(weights) for weights in held), "released adapters are in memory"
    assert all(in_memory(model.frozen()) for model in copies if isinstance(model, RoleModel)), "the base was dropped"
    return Run(
        told,
        {name: whole(weight) for name, weight in actor.weights().items()} if actor else {},
        moved,
        sum(local_tensor(weight).nbytes for weights in held for weight in weights.values()),
        [copy.role for copy in models],
        [in_one_memory(model, actor) for copy, model in models.items() if actor and copy.for_generation],
        sum(math.prod(value.shape) * value.element_size() for value in actor.state().values()) if actor else 0,
    )


def counted(move: Callable[..., None], wire: Counter[str]) -> Callable[..., None]:
    def run(self: Reallocation, *tensors: Any) -> None:
        with SentBytes() as sent:
            move(self, *tensors)
        wire["bytes"] += sent.total

    return run


def in_memory(weights: Mapping[str, Tensor]) -> bool:
    return any(local_tensor(weight).untyped_storage().nbytes() for weight in weights.values())


def in_one_memory(model: Any, trained: RoleModel) -> bool:
    theirs = trained.frozen()
    return all(
        local_tensor(w).data_ptr() == local_tensor(theirs[name]).data_ptr() for name, w in model.frozen().items()
    )


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()


def drop_a_gradient(self: Engine, *args: Any) -> float:
    for name, parameter in self.parameters.items():
        if name.endswith("layers.0.self_attn.q_proj.lora_B.default.weight"):
            assert parameter.grad is not None
            parameter.grad.zero_()
    return ENGINE_STEP(self, *args)


ENGINE_STEP = Engine.step
BROKEN: dict[str, Callable[[], AbstractContextManager]] = {
    "the reference sees the adapters": lambda: patch("usp.rlhf.roles.role_model.adapters_off", nullcontext),
    "the adapters have another scale": lambda: patch.object(
        adapters, "lora_config", lambda lora, targets: lora_config(replace(lora, alpha=lora.rank), targets)
    ),
    "a gradient is dropped": lambda: patch.object(Engine, "step", drop_a_gradient),
    "new adapters do not reach generation": lambda: patch.object(Reallocation, "run", move_those_of_the_first_step),
}


def run_all(folder: Path, plans: tuple[str, ...]) -> dict[str, Run]:
    groups = ProcessGroups()
    return {name: run(folder, name, groups) for name in ("alone", *plans)}


def run_broken(folder: Path) -> dict[str, Run]:
    groups = ProcessGroups()
    found = {"alone": run(folder, "alone", groups)}
    for name, broken in BROKEN.items():
        with broken():
            found[name] = run(folder, "flattening", groups)
    return found


def run_rounded(folder: Path) -> Run:
    return run(folder, "zero 0", ProcessGroups(), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(FAMILY, tmp_path_factory.mktemp(FAMILY))


def saved(family: str, folder: Path) -> Path:
    model = drawn_model(CONFIGS[family]())
    save_weights(dict(model.named_parameters()), folder, config=model.config)
    return folder


@pytest.fixture(scope="module")
def results(ranks: RankPool, base: Path, request: pytest.FixtureRequest) -> list[dict[str, Run]]:
    plans = PLANS if request.config.getoption("--exhaustive") else CHOSEN
    return ranks.run(run_all, RANKS, base, plans)


@pytest.fixture(scope="module")
def broken_results(ranks: RankPool, base: Path) -> list[dict[str, Run]]:
    return ranks.run(run_broken, 2, base)


def peft_model(folder: Path) -> PreTrainedModel:
    from peft import inject_adapter_in_model

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    inject_adapter_in_model(lora_config(LORA, LORA.targets), model)
    initialise_adapters(model, seed=0)
    return model


def said(model: PreTrainedModel, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return per token the log-probability of the next one and the entropy, 0 at the last token."""
    logs = (model(tokens.unsqueeze(0)).logits[0, :-1] / temperature).log_softmax(-1)
    ones, zero = logs.gather(1, tokens[1:].unsqueeze(1)).squeeze(1), torch.zeros(1)
    return torch.cat((ones, zero)), torch.cat((-(logs.exp() * logs).sum(1), zero))


@pytest.mark.slow
def test_the_steps_are_those_of_peft_in_one_process(results: list[dict[str, Run]], base: Path) -> None:
    """What one rank sampled is trained on by peft; log-probabilities and adapters agree."""
    alone, temperature = results[0]["alone"], GRPO.generate.temperature
    model, reference = peft_model(base), AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    trained = dict(adapter_parameters(model))
    optimizer, objective = ADAM.over(trained.values()), GRPO.objective()
    for number, (_, samples) in enumerate(alone.told):
        with torch.no_grad():
            for key, which in (("old_logprobs", model), ("ref_logprobs", reference)):
                wanted = torch.cat([said(which, tokens, temperature)[0] for tokens in samples["tokens"]])
                inside = torch.cat([token_weights != 0 for token_weights in samples["token_weights"]])
                assert distance(torch.cat(samples[key])[inside], wanted[inside]) < TOLERANCE, (number, key)
        size = len(samples["tokens"]) // GRPO.mini_batches
        for first in range(0, len(samples["tokens"]), size):
            part = {key: values[first : first + size] for key, values in samples.items()}
            outputs, entropies = zip(*(said(model, tokens, temperature) for tokens in part["tokens"]), strict=True)
            keys = {key: torch.cat(part[key]).unsqueeze(0) for key in objective.keys}
            sequences = WholeSequences([len(tokens) for tokens in part["tokens"]])
            torch_cat = (torch.cat(x).unsqueeze(0) for x in (outputs, entropies))
            objective(*torch_cat, keys, sequences)[0].backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATE
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in trained.items():
        assert distance(alone.adapters[name], weight.detach()) < TOLERANCE, name


def error_of(results: list[dict[str, Run]], name: str) -> float:
    """The largest error of a run's numbers, and of its adapters; infinite for other tokens."""
    wanted, found = results[0]["alone"], results[0][name]
    errors = []
    for (metrics, samples), (wanted_metrics, ones) in zip(found.told, wanted.told, strict=True):
        if not all(map(torch.equal, samples.get("tokens", ()), ones.get("tokens", ()))):
            return math.inf
        errors += [distance(torch.cat(samples[key]), torch.cat(ones[key])) for key in ones if key != "tokens"]
        losses = [key for key in wanted_metrics if key.endswith(("loss", "ref_kl"))]
        assert losses and metrics.keys() == wanted_metrics.keys()
        errors += [abs(metrics[key] - wanted_metrics[key]) for key in losses]
    adapters = {key: value for result in results for key, value in result[name].adapters.items()}
    assert adapters.keys() == wanted.adapters.keys()
    return max(errors + [distance(adapters[key], value) for key, value in wanted.adapters.items()])


@pytest.mark.slow
def test_every_plan_trains_the_adapters_of_one_process(results: list[dict[str, Run]], exhaustive: bool) -> None:
    errors = {name: error_of(results, name) for name in (PLANS if exhaustive else CHOSEN)}
    assert all(error < TOLERANCE for error in errors.values()), errors
    metrics, samples = results[0]["alone"].told[-1]
    apart = torch.cat(samples["old_logprobs"]) - torch.cat(samples["ref_logprobs"])
    assert apart.abs().max() > 0.1 and metrics["actor/ref_kl"] > 1e-4  # the policy has left the reference


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.slow
def test_what_is_broken_on_purpose_is_noticed(broken_results: list[dict[str, Run]], broken: str) -> None:
    assert error_of(broken_results, broken) > 100 * TOLERANCE


@pytest.mark.slow
def test_only_adapters_move_and_are_saved(results: list[dict[str, Run]]) -> None:
    """Reallocations move the bytes that the plan says, of the adapters that a rank lacks; the base is never sent."""
    sizes = {name: weight.nbytes for name, weight in results[0]["alone"].adapters.items()}
    total = sum(sizes.values())
    assert len(sizes) == 2 * len(ALL) * 2
    for name in CHOSEN:
        for rank, found in enumerate(of_rank[name] for of_rank in results):
            for sent, _, wire in found.moved:
                assert wire == sent, (name, rank)
            assert len(set(found.moved)) == 1, (name, "every step moves the same")
            if found.adapters:
                assert found.state == 3 * total + 4 * len(sizes)  # weights, two moments, steps
        sent, lacking, _ = (sum(of_rank[name].moved[0][i] for of_rank in results) for i in range(3))
        assert sent == lacking, name
        if name == "zero 0":
            assert sent == 0
        if name == "separation":  # what inference needs, its ranks have from generation, which lacked all of it
            assert 2 * sent == sum(of_rank[name].lacking for of_rank in results) > 0
        if name == "flattening":  # from a quarter on each rank to all of them on each: three quarters are lacking
            assert sent == 3 * total


@pytest.mark.slow
def test_the_reference_on_the_layout_of_the_policy_needs_no_weights(
    ranks: RankPool, base: Path, results: list[dict[str, Run]]
) -> None:
    for of_rank in results:
        for name in CHOSEN:
            assert set(of_rank[name].roles) <= {"actor"}, name
    rounded = ranks.run(run_rounded, 2, base)
    for exact, of_rank in zip(results, rounded, strict=False):
        assert exact["zero 0"].shared == of_rank.shared == [True]  # also where adapters are rounded
        assert of_rank.lacking > 0 and of_rank.moved[0] == (0, 0, 0)
    assert rounded[0].told[1][0]["logprob_difference_max"] < 0.1


def test_plans_that_place_the_reference_elsewhere_give_it_weights() -> None:
    graph = build_graph("grpo", GRPO)
    plan = plan_of("interleaving", graph)
    assert policy_as_reference(graph, plan) == (graph, plan)
    changed, offloading = policy_as_reference(graph, plan_of("heuristic", graph))
    assert changed.roles == ("actor",) and not offloading.offload
    dpo = build_graph("dpo", ALGORITHMS["dpo"])
    layouts = plan_of("heuristic", dpo)
    assert layouts["ref_inference"] != layouts["actor_train"]  # in tp_sequence_parallel alone
    assert policy_as_reference(dpo, layouts)[0].roles == ("actor",)
    sharded = plan_of("separation", dpo)
    assert policy_as_reference(dpo, sharded)[0].roles == ("actor", "ref")


def run_others(folder: Path, chosen: tuple[tuple[str, str, str], ...]) -> list[dict[str, Run]]:
    found, groups = [], ProcessGroups()
    for family, algorithm, plan in chosen:
        options = OTHERS.get(algorithm, GRPO)
        found.append({name: run(folder / family, name, groups, algorithm, options) for name in ("alone", plan)})
    return found


@pytest.mark.exhaustive  # each part: test_numerics.py, and the adapters of PPO above
def test_other_algorithms_and_models_train_the_adapters_of_one_process(
    ranks: RankPool, tmp_path: Path, exhaustive: bool
) -> None:
    every = [(FAMILY, algorithm, plan) for algorithm in OTHERS for plan in ("flattening", SPLIT, "separation")]
    every += [("mixtral", "grpo", "flattening"), ("mixtral", "grpo", "separation without tp")]
    every += [("qwen2", "grpo", SPLIT), ("llama-tied", "grpo", SPLIT)]
    chosen = tuple(every) if exhaustive else (("llama-tied", "dpo", SPLIT), (FAMILY, "ppo", "separation"))
    for family in {family for family, _, _ in chosen}:
        saved(family, tmp_path / family)
    found = ranks.run(run_others, RANKS, tmp_path, chosen, timeout=900)
    for number, (family, algorithm, plan) in enumerate(chosen):
        assert error_of([of_rank[number] for of_rank in found], plan) < TOLERANCE, (family, algorithm, plan)


# Runs of rlhf.py

REWARD = "def parity(prompt, response, answer):\n    return sum(map(ord, response)) % 7 / 7\n"
RUN = RlhfConfig(
    algorithm="grpo",
    options="mini_batches=2",
    prompts=2,
    group_size=2,
    prompt_tokens=64,
    max_new_tokens=4,
    steps=3,
    warmup_steps=1,
    checkpoint_every=2,
    learning_rate=1e-2,
    device="cpu",
    tokenizer="bytes",
    lora_rank=4,
    lora_targets="q_proj,v_proj,down_proj",
)


def start(config: RlhfConfig) -> None:
    ranks = dist.get_world_size()
    launch = Launch(rank=dist.get_rank(), world_size=ranks, local_world_size=ranks)
    RlhfTrainer(prepare(config, launch), launch, StopRequest(), Watchdog(Launch(), seconds=0)).run()


def run_twice(config: RlhfConfig) -> None:
    """Run to the end, and again from the checkpoint in between under another plan."""
    first = Path(config.output)
    start(replace(config, sp_ulysses=2, lora_merge=True))
    resume = str(first / CHECKPOINTS / "step-00000002")
    start(replace(config, plan="separation", resume=resume, output=str(first.with_name("again"))))


@pytest.fixture(scope="module")
def finished(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, beside its base, the reward and a run that was resumed."""
    folder = tmp_path_factory.mktemp("run")
    config = load_model_config("qwen3-tiny")
    save_weights(dict(drawn_model(config).named_parameters()), folder / "base", config=config)
    (folder / "reward.py").write_text(REWARD)
    ranks.run(run_twice, 2, config_in(folder))
    return folder / "run"


def config_in(folder: Path, **changes: Any) -> RlhfConfig:
    reward = f"{folder / 'reward.py'}:parity"
    config = replace(RUN, model=str(folder / "base"), reward_function=reward, output=str(folder / "run"))
    return replace(config, **changes)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


@pytest.mark.slow
def test_the_adapter_folder_is_the_trained_policy(finished: Path) -> None:
    base, ids = finished.parent / "base", torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load(base), finished / "adapter")(ids).logits
        torch.testing.assert_close(load(finished / "model")(ids).logits, adapted, rtol=1e-5, atol=1e-5)
        assert (adapted - load(base)(ids).logits).abs().max() > 1e-2
    settings = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 8, str(base))
    assert sorted(settings["target_modules"]) == ["down_proj", "q_proj", "v_proj"]


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapters_and_their_states_alone(finished: Path) -> None:
    adapter = load_file(finished / "adapter" / "adapter_model.safetensors")
    sizes: Counter[str] = Counter()
    for file in (finished / CHECKPOINTS / "step-00000003").glob("rank-*.safetensors"):
        sizes.update({name: tensor.numel() for name, tensor in load_file(file).items()})
    assert sum(sizes.values()) == 3 * sum(tensor.numel() for tensor in adapter.values()) + len(adapter)


@pytest.mark.slow
def test_a_run_continues_under_another_plan(finished: Path) -> None:
    again = finished.with_name("again")
    wanted = load_file(finished / "adapter" / "adapter_model.safetensors")
    found = load_file(again / "adapter" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() and not (again / "model").exists()
    for name, tensor in wanted.items():
        assert distance(found[name], tensor) < 1e-4, name
    last = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (finished, again)]
    assert last[0]["actor/loss"] == pytest.approx(last[1]["actor/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 0, "lora_alpha": 8, "lora_targets": "all-linear"}, "--lora-alpha = 8 is an option of LoRA"),
        ({"lora_rank": -1}, "--lora-rank = -1 must be at least 0"),
        ({"lora_targets": "q_proj,w1"}, "--lora-targets q_proj,w1 names 'w1', but the linear layers of qwen3 are"),
        ({"model": "tiny", "sft_steps": 0}, "--lora-rank = 4 trains adapters .*preset with random ones: .*--sft-steps"),
        ({"algorithm": "reward_model", "options": "", "reward_function": "match"}, "--algorithm reward_model, which"),
        ({"lora_rank": 8, "resume": "auto"}, r"--lora-rank = 8 \(checkpoint: 4\), --lora-alpha = 16 \(checkpoint: 8\)"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(finished: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        prepare(config_in(finished.parent, **changes), Launch())


@pytest.mark.slow
def test_the_reference_has_weights_only_where_it_is_another_model(finished: Path) -> None:
    folder = finished.parent
    four = Launch(world_size=4, local_world_size=4)
    asked = {"output": str(folder / "new"), "learning_rate": AUTO_RATE}
    plain = prepare(config_in(folder, **asked), four)
    assert set(plain.roles) == {"actor"} and plain.roles["actor"].lora == Lora(4, 8, ("down_proj", "q_proj", "v_proj"))
    assert plain.config.learning_rate == pytest.approx(1e-5)
    assert not plain.graph["ref_inference"].work.adapters  # type: ignore[union-attr]
    elsewhere = prepare(config_in(folder, **asked, plan="interleaving", offload=True), four)
    other = prepare(config_in(folder, **asked, ref=str(folder / "run" / "model")), four)
    for prepared in (elsewhere, other):
        assert set(prepared.roles) == {"actor", "ref"} and prepared.roles["ref"].lora is None
    assert other.roles["ref"].source == str(folder / "run" / "model")
    critic = prepare(config_in(folder, **asked, algorithm="ppo", options=""), four).roles["critic"]
    assert critic.lora is None
