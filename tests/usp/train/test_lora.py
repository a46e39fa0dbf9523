"""LoRA adapters train on every layout as peft trains them in one process, and nothing else is trained or saved."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from examples.models import tiny_config
from tests.harness.ranks import RankError, RankPool
from tests.usp.hf.test_every_model import plain, relative
from tests.usp.hf.test_every_model import tiny_model as family_model
from tests.usp.tiny import (
    ADAM_EPS,
    CONFIGS,
    FEW_STEPS,
    LEARNING_RATE,
    MAX_NORM,
    ROWS,
    SEQ_LEN,
    drawn_model,
    loss_alone,
    packed_batch,
    tiny_model,
    train_alone,
    train_step,
)
from tests.usp.train.test_matrix import train
from usp import apply_unified_sp, shard_batch
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.lora import ADAPTER, Lora, adapter_parameters, initialise_adapters, lora_config, lora_targets, save_adapter
from usp.hf.models import load_model_config
from usp.losses import NextTokenLoss, causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.predict.meter import OPTIMIZER
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.checkpoints import CHECKPOINTS
from usp.train.dry_run import dry_run
from usp.train.prepare import prepare
from usp.train.resolve import resolve
from usp.train.trainer import Trainer
from usp.train.trainer import train as train_run

RANK, ALPHA = 4, 12
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ALL[:4]
# Ranks, family, the linears with adapters, and flags.
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...], dict[str, Any]]] = {
    "dp2 r2, zero 3": (4, "llama", ALL, {"sp_ring": 2, "micro_batches": 2}),
    "tp2 u2, zero 1": (4, "llama", ALL, {"tp": 2, "sp_ulysses": 2, "zero": 1, "micro_batches": 2}),
    "tp2 r2, tokens shared": (
        4,
        "qwen3",
        ALL,
        {"tp": 2, "tp_sequence_parallel": True, "sp_ring": 2, "ac": "attention-saved", "mlp_tile": 5},
    ),
    "pp2 tp2, zero 2": (4, "llama", ALL, {"pp": 2, "tp": 2, "zero": 2, "micro_batches": 2}),
    "pp2 r2, zero bubble": (
        4,
        "llama-deep",
        ("q_proj", "down_proj"),
        {"pp": 2, "pp_schedule": "zero-bubble", "sp_ring": 2, "zero": 1, "micro_batches": 4},
    ),
    "dp_replicate2 u2, zero 0, tied": (4, "llama-tied", ALL, {"dp_replicate": 2, "sp_ulysses": 2, "zero": 0}),
    "ep2 u2 r2": (4, "mixtral", ATTENTION, {"ep": 2, "sp_ulysses": 2, "sp_ring": 2, "ac": "full"}),
}
# Those that test_adapter_options.py has with modules that are trained in full.
EXHAUSTIVE = ("dp2 r2, zero 3", "tp2 u2, zero 1", "pp2 tp2, zero 2", "ep2 u2 r2")


def add_adapters(model: PreTrainedModel, targets: tuple[str, ...], rank: int = RANK) -> None:
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=list(targets)), model)
    initialise_adapters(model, seed=0)


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[Any, Any]:
    """For each family and its targets a folder with the model, and (loss, gradient norm) of each step of peft alone."""
    found, some = {}, {"llama", *(layout[1] for name, layout in LAYOUTS.items() if name not in EXHAUSTIVE)}
    for family, targets in {layout[1:3] for layout in LAYOUTS.values() if exhaustive or layout[1] in some}:
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(folder)
        change = partial(add_adapters, targets=targets)
        found[family, targets] = folder, ranks.run(train_alone, 1, family, FEW_STEPS, 0.0, 1, change)[0]
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ()) for name in LAYOUTS]
)
@pytest.mark.slow
def test_steps_are_those_of_peft_in_one_process(ranks: RankPool, alone: dict[Any, Any], name: str) -> None:
    world_size, family, targets, flags = LAYOUTS[name]
    folder, wanted = alone[family, targets]
    histories = ranks.run(train, world_size, config_of(folder, targets, **flags), FEW_STEPS)
    difference = (torch.tensor(histories, dtype=torch.float64) / torch.tensor(wanted, dtype=torch.float64) - 1).abs()
    assert difference.max() <= 1e-5, difference.amax(dim=0)


def only_adapters(config: TrainConfig, adapter: str) -> dict[str, Any]:
    """Train a few steps; return what is held, sent and saved, and the loss of a further batch; write the adapters."""
    config, model_config, _, dims = resolve(config, dist.get_world_size()).valid()
    mesh, recipe = ParallelMesh.create(dims), EngineRecipe.of(config, model_config)
    engine = build_engine(recipe, mesh, torch.device("cpu"), partial(first_weights, source=config.model, seed=0))
    batches = [shard_batch(packed_batch(step), mesh, config.sp_layout) for step in range(4)]
    for batch in batches[:3]:
        with SentBytes() as sent:
            train_step(engine, mesh, batch, config, config.learning_rate)
    engine.forward_backward(batches[2:3], NextTokenLoss(1))
    with_gradients = {name for stage in engine.stages for name, p in stage.named_parameters() if p.grad is not None}
    loss = engine.evaluate(batches[3:], NextTokenLoss(int(global_token_count(batches[3]["shift_labels"], mesh))))
    dist.all_reduce(loss, group=mesh.group("loss"))
    state = engine.state()
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    save_adapter(weights, Path(adapter), lora=recipe.lora, base=Path(config.model))
    return {
        "loss": loss.item(),
        "reduced": sum(sent.by_op[name] for name in sent.by_op if "reduce_scatter" in name),
        "with gradients": with_gradients,
        "with states": {name for name, p in engine.parameters.items() if engine.optimizer.state[p]},
        "state": {name: tuple(value.shape) for name, value in state.items()},
    }


@pytest.mark.slow
def test_only_adapters_have_gradients_and_states_and_are_reduced_and_written(
    ranks: RankPool, alone: dict[Any, Any], tmp_path: Path
) -> None:
    folder, _ = alone["llama", ALL]
    config = config_of(folder, sp_ulysses=2, sp_ring=2, zero=2)
    found = ranks.run(only_adapters, 4, config, str(tmp_path / "adapter"))
    model = tiny_model("llama")
    add_adapters(model, ALL)
    adapters = {name: tuple(p.shape) for name, p in adapter_parameters(model)}
    assert len(adapters) == 2 * 7 * 2
    elements = sum(math.prod(shape) for shape in adapters.values())
    for rank in found:
        assert rank["with gradients"] == {f"model.{name}" for name in adapters}
        assert rank["with states"] == adapters.keys()
        moments = {f"optimizer.{name}.{key}": s for name, s in adapters.items() for key in ("exp_avg", "exp_avg_sq")}
        steps = {f"optimizer.{name}.step": () for name in adapters}
        assert rank["state"] == {f"model.{name}": s for name, s in adapters.items()} | moments | steps
        assert rank["reduced"] == elements * 4 * 3 // 4  # float32, to three of four ranks

    loaded = PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert loaded.peft_config["default"].base_model_name_or_path == str(folder)
    assert sum(p.numel() for name, p in loaded.named_parameters() if ".lora_" in name) == elements
    with torch.no_grad():
        wanted = loss_alone(loaded.base_model.model, packed_batch(3)).item()
        base = loss_alone(load(folder), packed_batch(3)).item()
    assert found[0]["loss"] == pytest.approx(wanted, rel=1e-6)
    assert abs(wanted / base - 1) > 5e-5


def step_past_an_adapter(config: TrainConfig) -> None:
    config, model_config, _, dims = resolve(config, 1).valid()
    mesh, recipe = ParallelMesh.create(dims), EngineRecipe.of(config, model_config)
    engine = build_engine(recipe, mesh, torch.device("cpu"), partial(first_weights, source=config.model, seed=0))
    linear = engine.stages[0].model.get_submodule("model.layers.1.mlp.up_proj")
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight)
    train_step(engine, mesh, shard_batch(packed_batch(0), mesh, config.sp_layout), config, 1e-3)


def test_a_layer_that_passes_by_its_adapter_is_found(ranks: RankPool, alone: dict[Any, Any]) -> None:
    with pytest.raises(RankError, match=r"model.layers.1.mlp.up_proj.lora_A.default.weight, .* did not take part"):
        ranks.run(step_past_an_adapter, 1, config_of(alone["llama", ALL][0]))


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


# Runs of train.py


@pytest.fixture(autouse=True)
def no_group_stays_open() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


RUN = TrainConfig(
    seq_len=64,
    steps=4,
    warmup_steps=2,
    checkpoint_every=2,
    batch_size=4,
    adam_eps=1e-4,
    learning_rate=1e-2,
    device="cpu",
    tokenizer="bytes",
    lora_rank=8,
)
SAVED_ON = {"batch_size": 2, "lora_merge": True}  # dp2; on sp: test_adapter_options.py
RESUMED_ON = [
    (2, SAVED_ON),
    pytest.param(4, {"tp": 2, "pp": 2, "micro_batches": 2}, marks=pytest.mark.exhaustive),  # test_adapter_options.py
    (1, {"zero": 0}),
]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped, beside its base model."""
    folder = tmp_path_factory.mktemp("run")
    config = load_model_config("qwen3-tiny")
    save_weights(dict(drawn_model(config).named_parameters()), folder / "base", config=config)
    started = replace(RUN, model=str(folder / "base"), output=str(folder / "whole"), **SAVED_ON)
    ranks.run(run, 2, started)
    return folder / "whole"


@pytest.mark.parametrize(("world_size", "layout"), RESUMED_ON, ids=str)
@pytest.mark.slow(full=1)
def test_a_run_continues_on_any_layout(
    ranks: RankPool, whole: Path, tmp_path: Path, world_size: int, layout: dict[str, Any]
) -> None:
    base, checkpoint = str(whole.parent / "base"), str(whole / CHECKPOINTS / "step-00000002")
    config = replace(RUN, model=base, output=str(tmp_path / "on"), resume=checkpoint, **layout)
    ranks.run(run, world_size, config)
    found, wanted = steps_of(tmp_path / "on"), steps_of(whole)[2:]
    assert (found / wanted - 1).abs().max() <= (0 if layout == SAVED_ON else 1e-5)
    for name, tensor in load_file(tmp_path / "on" / "adapter" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, adapter_of(whole)[name], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_holds_the_adapters_and_their_states_alone(whole: Path) -> None:
    adapter = adapter_of(whole)
    sizes: Counter[str] = Counter()
    for file in (whole / CHECKPOINTS / "step-00000004").glob("rank-*.safetensors"):
        sizes.update({name: tensor.numel() for name, tensor in load_file(file).items()})
    assert sum(sizes.values()) == 3 * sum(tensor.numel() for tensor in adapter.values()) + len(adapter)


def test_adapter_and_merged_model_are_the_same_model(whole: Path) -> None:
    base, ids = whole.parent / "base", torch.arange(40).unsqueeze(0)
    merged = load(whole / "model")(ids).logits
    adapted = PeftModel.from_pretrained(load(base), whole / "adapter")(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    assert (adapted - load(base)(ids).logits).abs().max() > 1e-2
    settings = json.loads((whole / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (8, 16, str(base))
    assert sorted(settings["target_modules"]) == sorted(ALL)


@pytest.mark.slow
def test_adapters_of_a_longer_context_come_with_its_configuration(tmp_path: Path) -> None:
    config = load_model_config("qwen3-tiny")
    config.max_position_embeddings = 64
    save_weights(dict(drawn_model(config).named_parameters()), tmp_path / "base", config=config)
    longer = replace(RUN, model=str(tmp_path / "base"), seq_len=128, batch_size=1, rope_scaling="yarn", steps=2)
    asked = replace(longer, lora_merge=True, output=str(tmp_path / "run"), checkpoint_every=0)
    train_run(prepare(asked, Launch()), Launch())
    run, ids = tmp_path / "run", torch.arange(100).unsqueeze(0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=AutoConfig.from_pretrained(run / "adapter"))
    adapted = PeftModel.from_pretrained(base, run / "adapter")(ids).logits
    torch.testing.assert_close(load(run / "model")(ids).logits, adapted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 4}, r"--lora-rank = 4 \(checkpoint: 8\), --lora-alpha = 8 \(checkpoint: 16\)"),
        ({"lora_rank": 0}, r"--lora-rank = 0 \(checkpoint: 8\)"),
        ({"lora_alpha": 8}, r"--lora-alpha = 8 \(checkpoint: 16\).* must be as before"),
        ({"lora_targets": "q_proj"}, r"--lora-targets = q_proj \(checkpoint: all-linear\)"),
    ],
)
@pytest.mark.slow(but=1, full=1)
def test_other_adapters_cannot_continue_a_run(whole: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    resume, base = str(whole / CHECKPOINTS / "step-00000002"), str(whole.parent / "base")
    with pytest.raises(ConfigurationError, match=said):
        prepare(replace(RUN, model=base, resume=resume, output=str(tmp_path), **changes), Launch())


def run(config: TrainConfig) -> None:
    ranks = dist.get_world_size()
    Trainer(prepare(config, Launch(rank=dist.get_rank(), world_size=ranks, local_world_size=ranks))).run()


def steps_of(folder: Path) -> torch.Tensor:
    """(loss, gradient norm) of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([(record["loss"], record["grad_norm"]) for record in records], dtype=torch.float64)


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


# What is refused, and defaults


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 0, "lora_alpha": 8}, "--lora-alpha = 8 is an option of LoRA adapters, but --lora-rank is 0"),
        ({"lora_rank": 0, "lora_merge": True}, "--lora-merge is an option of LoRA adapters"),
        ({"lora_rank": -1}, "--lora-rank = -1 must be at least 0"),
        ({"lora_targets": "q_proj, w1"}, r"--lora-targets q_proj, w1 names 'w1', but the linear layers of qwen3 are "),
        ({"model": "tiny"}, "--lora-rank = 8 trains adapters .*--model tiny is a preset with random ones"),
    ],
)
@pytest.mark.slow(but=2)
def test_what_cannot_be_trained_is_refused(whole: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        prepare(replace(RUN, **{"model": str(whole.parent / "base")} | changes), Launch())


@pytest.mark.slow
def test_experts_get_no_adapters() -> None:
    config = CONFIGS["qwen3_moe"]()  # its first layer is dense, and peft takes its names for those of experts
    assert lora_targets(config, "all-linear") == ("k_proj", "o_proj", "q_proj", "v_proj")
    with pytest.raises(ValueError, match="peft takes down_proj, gate_proj of qwen3_moe for its experts"):
        lora_targets(config, "q_proj,gate_proj,down_proj")
    with pytest.raises(ValueError, match=r"experts are fused parameters, which get no adapters"):
        lora_targets(config, "gate_up_proj")


def gate_errors() -> tuple[float, float]:
    """The errors of the gradients of adapters on Qwen3-Next's gates, on one process and sharded, against float64."""
    ids = torch.randint(3, 90, (2, 32), generator=torch.Generator().manual_seed(1))

    def adapted() -> PreTrainedModel:
        model = family_model("qwen3_next")
        model.set_experts_implementation("eager")
        inject_adapter_in_model(lora_config(Lora(RANK, ALPHA, ()), ["in_proj_ba"]), model, ADAPTER)
        generator = torch.Generator().manual_seed(0)
        for _, parameter in adapter_parameters(model):
            parameter.data.normal_(std=0.1, generator=generator)
        return model

    def gradients(model: PreTrainedModel) -> torch.Tensor:
        return torch.cat([parameter.grad.double().flatten() for _, parameter in adapter_parameters(model)])

    whole = [adapted().to(dtype) for dtype in (torch.float64, torch.float32)]
    for model in whole:
        plain(model, ids, [0, 32])
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    sharded, batch = apply_unified_sp(adapted(), mesh), shard_batch({"input_ids": ids, "labels": ids}, mesh)
    labels = batch.pop("shift_labels")
    causal_lm_loss(sharded(**batch).logits, labels, global_token_count(labels, mesh)).backward()
    own = gradients(sharded)
    dist.all_reduce(own)
    exact = gradients(whole[0])
    return relative(gradients(whole[1]), exact), relative(own, exact)


@pytest.mark.slow
def test_small_gradients_of_gates_are_as_exact_as_on_one_process(ranks: RankPool) -> None:
    """Adam with a small epsilon makes full steps of them, and of their rounding: adapters of gates differ between any
    two runs in float32 by more than others."""
    for alone, sharded in ranks.run(gate_errors, 4):
        assert alone <= 2e-5 and sharded <= 2e-5


@pytest.mark.slow
def test_targets_leave_out_what_peft_refuses() -> None:
    """Of Mamba layers, out_proj, which kernels of a whole layer read by themselves; with experts and without."""
    for model_type in ("nemotron_h", "falcon_h1"):
        config = tiny_config(model_type)
        assert "out_proj" not in lora_targets(config, "all-linear")
        assert lora_targets(config, "in_proj,q_proj") == ("in_proj", "q_proj")
        with pytest.raises(ValueError, match=f"peft refuses out_proj of {model_type}: use .*in_proj"):
            lora_targets(config, "out_proj,q_proj")


@pytest.mark.slow
def test_defaults_are_those_of_adapters(whole: Path) -> None:
    config = resolve(replace(RUN, model=str(whole.parent / "base"), learning_rate=TrainConfig.learning_rate), 1).config
    assert (config.learning_rate, config.lora_alpha) == (1e-4, 16)


@pytest.mark.slow
def test_a_dry_run_has_the_optimizer_states_of_the_adapters() -> None:
    found = dry_run(replace(RUN, model="tiny", dtype="float32", batch_size=1, seq_len=64), 4)
    model = drawn_model(load_model_config("tiny"))
    add_adapters(model, ALL, rank=8)
    elements = sum(p.numel() for _, p in adapter_parameters(model))
    assert found.by_category[OPTIMIZER] == elements * 8 // 4 + 2 * 7 * 2 * 4  # and a step count for each


def config_of(folder: Path, targets: tuple[str, ...] = ALL, **flags: Any) -> TrainConfig:
    return TrainConfig(
        model=str(folder),
        seq_len=SEQ_LEN,
        adam_eps=ADAM_EPS,
        dtype="float32",
        loss_chunk=24,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        router_aux_loss_coef=0.0 if "mixtral" in folder.name else -1.0,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_targets="all-linear" if targets in (ALL, ATTENTION) else ",".join(targets),
        **{"batch_size": ROWS} | flags,
    )
