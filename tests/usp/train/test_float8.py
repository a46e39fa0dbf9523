"""Training in float8, emulated: casts and losses are torchao's own on one process, whatever the layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchao.float8 import Float8LinearConfig, GemmInputRole, ScalingGranularity, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_scale
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from tests.harness.ranks import RankPool
from tests.usp.tiny import (
    ADAM_EPS,
    LEARNING_RATE,
    MAX_NORM,
    ROWS,
    SEQ_LEN,
    VOCAB,
    loss_alone,
    optimiser,
    optimizer_steps,
    packed_batch,
)
from tests.usp.train.test_lora import ALL, ALPHA, RANK, add_adapters
from tests.usp.train.test_matrix import train
from usp.attention import SequenceLayout
from usp.config import TrainConfig
from usp.hf.experts import expert_modules
from usp.hf.float8 import RECIPES, MxLinear, float8_line
from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.parallel import ParallelMesh, local_tensor
from usp.parallel.reallocation.boxes import local_box
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.prepare import _device_problems, prepare
from usp.train.resolve import resolve
from usp.train.trainer import Trainer

STEPS = 2
CLOSE = torch.tensor([[1e-3, 5e-2]] * STEPS)  # losses and norms with other scales: each rank's tokens have their own
SAME = torch.tensor([[1e-6, 1e-6], [1e-5, 1e-2]])  # with the same; then rounding may choose the next float8 number
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
ADAPTERS = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": ",".join(ALL)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, flags
    "alone": (1, {"fp8": "tensor"}),
    "alone, rows": (1, {"fp8": "row"}),
    "dp4": (4, {"fp8": "tensor", "ac": "full"}),
    "ring x ulysses": (4, {"fp8": "tensor", "sp_ring": 2, "sp_ulysses": 2, "ac": "attention-saved"}),
    "tp2 dp2": (4, {"fp8": "tensor", "tp": 2, "micro_batches": 2}),
    "pp2 dp2": (4, {"fp8": "tensor", "pp": 2, "micro_batches": 2, "zero": 1}),
    "rows, tp2 ring2": (4, {"fp8": "row", "tp": 2, "tp_sequence_parallel": True, "sp_ring": 2, "ac": "selective"}),
    "adapters": (4, {"fp8": "tensor", "sp_ulysses": 2, **ADAPTERS}),
    "rows, adapters": (2, {"fp8": "row", "tp": 2, **ADAPTERS}),
    "mx alone": (1, {"fp8": "mx"}),
    "mx, ring2 dp2": (4, {"fp8": "mx", "sp_ring": 2, "ac": "attention-saved"}),
    "mx, tp2 dp2": (4, {"fp8": "mx", "tp": 2, "tp_sequence_parallel": True, "micro_batches": 2}),
    "mx, pp2 dp2": (4, {"fp8": "mx", "pp": 2, "micro_batches": 2, "zero": 1}),
    "mx, adapters": (2, {"fp8": "mx", "sp_ulysses": 2, **ADAPTERS}),
    "mx, compiled": (2, {"fp8": "mx", "compile": True}),
    "replicas": (4, {"fp8": "tensor", "dp_replicate": 2, "zero": 2, "optimizer": "muon"}),
    "compiled": (2, {"fp8": "tensor", "compile": True}),
    "compiled, rows, tp2": (2, {"fp8": "row", "tp": 2, "compile": True}),
}
ALWAYS = (
    "alone",
    "ring x ulysses",
    "pp2 dp2",
    "rows, tp2 ring2",
    "adapters",
    "mx, tp2 dp2",
)


def config_of(folder: Path, **flags: Any) -> TrainConfig:
    each = {"seq_len": SEQ_LEN, "global_batch_size": ROWS, "device": "cpu", "dtype": "float32", "loss_chunk": 24}
    optimizer = {"learning_rate": LEARNING_RATE, "adam_eps": ADAM_EPS, "max_grad_norm": MAX_NORM}
    return TrainConfig(model=str(folder), **each | optimizer | flags)


EMULATED = KernelPreference.EMULATED, ScaleCalculationMode.RCEIL


def in_float8(model: PreTrainedModel, fp8: str, tp: int = 1) -> PreTrainedModel:
    """Convert the layers of a model as torchao's users do; in MXFP8 without those whose parts are too small for it."""
    if fp8 == "mx":
        small = ("k_proj", "v_proj") if tp > 1 else ()
        recipe = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
        quantize_(model, recipe, lambda part, name: _in_layers(part, name) and not name.endswith(small))
        return model
    config = replace(Float8LinearConfig.from_recipe_name(RECIPES[fp8]), emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "layers." in name)


def _in_layers(part: torch.nn.Module, name: str) -> bool:
    return isinstance(part, torch.nn.Linear) and "layers." in name and not name.endswith("mlp.gate")


class MxInParts(torch.nn.Linear):
    """A linear in MXFP8 that casts the tokens of each rank by themselves, as `InParts`: blocks of 32 tokens share the
    scales of a weight's gradient."""

    parts: tuple[torch.Tensor, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat, back = x.flatten(0, -2), torch.cat(self.parts).argsort()
        products = [_to_mxfp8_then_scaled_mm(flat[rows], self.weight, *EMULATED) for rows in self.parts]
        return torch.cat(products)[back].view(*x.shape[:-1], -1)


class InParts(Float8Linear):
    """A linear of torchao that multiplies on one process what the ranks of a layout do: it casts the inputs and the
    gradients of each rank's tokens, and of its features, by themselves, and the weight in whole."""

    parts: tuple[torch.Tensor, ...]  # rows of the flattened input
    tp: int
    rowwise: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config.cast_config_weight
        scale = tensor_to_scale(self.weight, c.target_dtype)
        flat, results = x.flatten(0, -2), []
        for rows in self.parts:
            inputs = flat[rows].chunk(self.tp, -1) if self.rowwise else [flat[rows]] * self.tp
            products = []
            for each, weight in zip(inputs, self.weight.chunk(self.tp, 1 if self.rowwise else 0), strict=True):
                if c.scaling_granularity is ScalingGranularity.TENSORWISE:
                    role = GemmInputRole.WEIGHT
                    weight = hp_tensor_and_scale_to_float8(weight, scale, c.target_dtype, self.linear_mm_config, role)
                products.append(
                    matmul_with_hp_or_float8_args.apply(each, weight.t(), self.linear_mm_config, self.config)
                )
            results.append(sum(products) if self.rowwise else torch.cat(products, -1))
        back = torch.cat(self.parts).argsort()
        return torch.cat(results)[back].view(*x.shape[:-1], -1)


def parts_of(config: TrainConfig, ranks: int) -> tuple[torch.Tensor, ...]:
    """Return the tokens (row * SEQ_LEN + position) of each rank and micro-batch."""
    layout = SequenceLayout(config.sp_layout, SEQ_LEN, config.sp_ring, config.sp_ulysses)
    data = ranks // (config.tp * config.pp * config.sp_ring * config.sp_ulysses)
    places = [layout.positions(r, u) for r in range(config.sp_ring) for u in range(config.sp_ulysses)]
    rows = torch.arange(ROWS).chunk(data * config.micro_batches)
    return tuple((each.unsqueeze(1) * SEQ_LEN + place).flatten() for each in rows for place in places)


def train_alone(
    folder: str, fp8: str, adapters: bool = False, parts: tuple[torch.Tensor, ...] = (), tp: int = 1
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step of transformers and torchao on one process; "": without float8.

    parts, tp: of a layout whose casts are repeated, see `InParts`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = in_float8(model, fp8, tp) if fp8 and not (parts and fp8 == "mx") else model
    small = ("k_proj", "v_proj") if tp > 1 else ()
    for name, module in model.named_modules() if parts else ():
        if fp8 == "mx" and _in_layers(module, name) and not name.endswith(small):
            module.__class__, module.parts = MxInParts, parts
        elif isinstance(module, Float8Linear):
            module.__class__, module.parts, module.tp = InParts, parts, tp
            module.rowwise = name.endswith(("o_proj", "down_proj"))
    if adapters:
        add_adapters(model, ALL)
    return optimizer_steps(model, optimiser(model), STEPS, lambda step: loss_alone(model, packed_batch(step)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=256, **SIZES)
    folder = tmp_path_factory.mktemp("float8") / "llama"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(llama: Path) -> Callable[[str, bool], torch.Tensor]:
    """(loss, gradient norm) of each step by recipe, and whether adapters are trained."""
    return cache(lambda fp8, adapters: torch.tensor(train_alone(str(llama), fp8, adapters), dtype=torch.float64))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exhaustive) for name in LAYOUTS]
)
@pytest.mark.slow(but=1)
def test_losses_are_those_of_torchao_on_one_process(
    ranks: RankPool, llama: Path, alone: Callable[[str, bool], torch.Tensor], name: str
) -> None:
    world_size, flags = LAYOUTS[name]
    config, adapters = config_of(llama, **flags), "lora_rank" in flags
    found = torch.tensor(ranks.run(train, world_size, config, STEPS), dtype=torch.float64)
    steps = 1 if config.optimizer == "muon" else STEPS  # torchao alone is updated by AdamW
    same_casts = train_alone(str(llama), config.fp8, adapters, parts_of(config, world_size), config.tp)
    for wanted, bound in ((alone(config.fp8, adapters), CLOSE), (torch.tensor(same_casts, dtype=torch.float64), SAME)):
        differences = (found / wanted - 1).abs()[:, :steps].amax(0)
        assert (differences <= bound[:steps]).all(), differences


def test_float8_is_neither_float32_nor_another_recipe(alone: Callable[[str, bool], torch.Tensor]) -> None:
    norms = {fp8: alone(fp8, False)[:, 1] for fp8 in ("", *RECIPES)}
    for one, other in set(combinations(norms, 2)) - {("row", "mx")}:  # powers of 2 round alike but the smallest numbers
        assert (norms[one] / norms[other] - 1).abs().max() > 1e-4


def casts(config: TrainConfig) -> dict[str, tuple[Any, ...]]:
    """Return the slices, float8 values and scale of each weight that this rank gathers, by its name."""
    config, model_config, _, dims = resolve(config, dist.get_world_size()).valid()
    mesh, fill = ParallelMesh.create(dims), partial(first_weights, source=config.model, seed=0)
    engine = build_engine(EngineRecipe.of(config, model_config), mesh, torch.device("cpu"), fill)
    found = {}
    for stage in engine.stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        for name, parameter in stage.model.named_parameters():
            value = local_tensor(parameter.detach())
            if config.fp8 == "mx" and name.partition("layers.")[2].endswith("proj.weight"):
                scale, data = to_mx(value, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
                found[name] = local_box(parameter).slices(), data.view(torch.uint8), scale.view(torch.uint8)
            elif hasattr(value, "_data"):
                found[name] = local_box(parameter).slices(), value._data.view(torch.uint8).clone(), value._scale.clone()
    return found


@pytest.mark.parametrize("flags", [{"sp_ring": 2}, {"tp": 2}, {"tp": 2, "pp": 2, "micro_batches": 2}], ids=str)
@pytest.mark.slow(full=2)
def test_gathered_weights_are_torchaos_casts_bit_by_bit(ranks: RankPool, llama: Path, flags: dict[str, Any]) -> None:
    weights = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).state_dict()
    seen = set()
    for found in ranks.run(casts, 4, config_of(llama, fp8="tensor", **flags)):
        for name, (slices, values, scale) in found.items():
            whole = hp_tensor_to_float8_dynamic(weights[name], torch.float8_e4m3fn, None)
            assert torch.equal(values, whole._data.view(torch.uint8)[slices]) and scale == whole._scale
        seen |= found.keys()
    assert seen == {f"model.layers.{i}.{m}.weight" for i in (0, 1) for m in LINEARS}


def test_linears_in_mxfp8_are_torchaos_bit_by_bit() -> None:
    """Of blocks so different in size that one scale for a row would lose one of them."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 2.0**-20]).repeat_interleave(32)
    x, weight = torch.randn(3, 32, 64) * sizes, torch.randn(96, 64) * sizes.flip(0)
    recipe, found = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL), []
    for ours in (True, False):
        linear, inputs = torch.nn.Linear(64, 96, bias=False), x.clone().requires_grad_()
        linear.weight = torch.nn.Parameter(weight.clone())
        if ours:
            linear.__class__, linear.emulate = MxLinear, True
        else:
            quantize_(torch.nn.Sequential(linear), recipe, lambda part, name: isinstance(part, torch.nn.Linear))
        out = linear(inputs)
        out.square().sum().backward()
        found.append((out.detach(), inputs.grad, linear.weight.grad))
    assert all(map(torch.equal, *found))
    exact = x @ weight.t()
    assert 1e-3 < (found[0][0] - exact).norm() / exact.norm() < 0.1


@pytest.mark.slow
def test_parts_of_weights_have_the_blocks_of_the_whole_in_mxfp8(ranks: RankPool, llama: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).state_dict()
    for found in ranks.run(casts, 4, config_of(llama, fp8="mx", tp=2, sp_ring=2)):
        assert found
        for name, (slices, values, scale) in found.items():
            whole_scale, whole = to_mx(weights[name], torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
            columns = slice(*(n // 32 for n in (slices[1].start, slices[1].stop)))
            assert torch.equal(values, whole.view(torch.uint8)[slices])
            assert torch.equal(scale, whole_scale.view(torch.uint8)[slices[0], columns])


LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def run(config: TrainConfig) -> None:
    ranks = dist.get_world_size()
    Trainer(prepare(config, Launch(rank=dist.get_rank(), world_size=ranks, local_world_size=ranks))).run()


@pytest.mark.exhaustive  # of float32 weights: test_resume.py
def test_a_run_continues_on_another_layout_and_its_export_loads(ranks: RankPool, tmp_path: Path) -> None:
    base = TrainConfig(fp8="tensor", seq_len=64, steps=2, checkpoint_every=1, adam_eps=1e-4, device="cpu")
    base = replace(base, global_batch_size=2, export_dtype="bfloat16")
    first, second = tmp_path / "first", tmp_path / "second"
    ranks.run(run, 2, replace(base, sp_ring=2, output=str(first)))
    checkpoint = str(first / "checkpoints" / "step-00000001")
    ranks.run(run, 2, replace(base, tp=2, output=str(second), resume=checkpoint))
    whole, continued = (losses(folder) for folder in (first, second))
    assert sorted(continued) == [2] and all(abs(whole[step] / continued[step] - 1) <= 1e-3 for step in continued)
    model = AutoModelForCausalLM.from_pretrained(second / "model", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"pp": 2, "pp_schedule": "zero-bubble", "micro_batches": 4, "zero": 1}, "computes both gradients .* at once"),
    ({"sample_every": 1, "sample_prompts": "x"}, "in torch's inference mode, .* do not support: remove one"),
    ({"optim_offload": True}, "--optim-offload has these on the host: use row"),
    ({"seq_len": 40, "sp_ring": 2, "global_batch_size": 2}, "multiple of 16 tokens of a sequence on a rank.*has 20"),
    ({"mlp_tile": 24}, "multiple of 16 tokens of --mlp-tile, .* and has 24"),
    ({"fp8": "none", "fp8_emulate": True}, "--fp8-emulate is an option of --fp8, which is none"),
    ({"fp8": "mx", "sp_ring": 4, "global_batch_size": 4}, "multiple of 32 tokens of a sequence on a rank.*has 16"),
    ({"sp_ring": 3, "dp_shard": 1, "seq_len": 96}, "which they do not for self_attn.q_proj.weight .64 rows."),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=str)
def test_what_cannot_work_is_refused_before_any_rank_communicates(
    llama: Path, flags: Mapping[str, Any], said: str
) -> None:
    config = config_of(llama, **{"fp8": "tensor"} | flags)
    with pytest.raises(ConfigurationError, match=said):
        resolve(config, config.sp_ring * config.pp).valid()


def test_a_gpu_without_float8_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr("usp.train.prepare.find_spec", lambda name: None)
    config, gpu = TrainConfig(fp8="row"), torch.device("cuda", 0)
    package, device = _device_problems(config, gpu)
    assert package == "--fp8 row needs the package torchao: pip install 'usp-toolkit[fp8]'"
    assert device == "--fp8 row needs a GPU with float8 (8.9 or above), not NVIDIA A100: give --fp8-emulate"
    _, device = _device_problems(replace(config, fp8="mx"), gpu)
    assert device == "--fp8 mx needs a GPU with float8 (10.0 or above), not NVIDIA A100: give --fp8-emulate"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert list(_device_problems(config, gpu)) == [package]
    _, device = _device_problems(replace(config, fp8="mx"), gpu)
    assert device == "--fp8 mx needs torch with CUDA 12.8, not 12.6: give --fp8-emulate"
    assert list(_device_problems(replace(config, fp8_emulate=True), gpu)) == [package]
    assert list(_device_problems(config, torch.device("cpu"))) == [package]


def test_the_summary_says_what_is_not_in_float8() -> None:
    config = load_model_config("qwen3-moe-tiny")
    line = float8_line(model_shape(model_facts("", config), config), "row", 1, emulated=True)
    assert "rowwise recipe for 8 linears, emulated" in line
    assert "not in float8: mlp.gate, mlp.experts.gate_up_proj, mlp.experts.down_proj, output head" in line
    line = float8_line(model_shape(model_facts("", config), config), "mx", 1, emulated=True)
    assert "mxfp8_rceil recipe for 12 weights, emulated" in line and "not in float8: mlp.gate, output head" in line


# Experts


def experts_alone(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Run the experts of a layer on one process by torchao's products."""
    order, number = chosen.flatten().argsort(stable=True), chosen.shape[1]
    ends = torch.bincount(chosen.flatten(), minlength=module.num_experts).cumsum(0).int()
    options: dict[str, Any] = {"kernel_preference": EMULATED[0], "pad_token_groups_for_grouped_mm": True}

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(rows, weight.transpose(1, 2), ends, **options).float()

    inner = module._apply_gate(product(hidden[order // number], module.gate_up_proj))
    mixed = product(inner, module.down_proj) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(hidden).index_add(0, order // number, mixed)


def mixture_alone(folder: str) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step of transformers and torchao on one process."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    in_float8(model, "mx")
    for module in expert_modules(model):
        module.forward = partial(experts_alone, module)
    return optimizer_steps(model, optimiser(model), STEPS, lambda step: loss_alone(model, packed_batch(step)))


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [(1, {}), (4, {"ep": 2, "sp_ring": 2}), pytest.param(4, {"ep": 4, "pp": 1}, marks=pytest.mark.exhaustive)],
    ids=str,
)
@pytest.mark.slow
def test_experts_in_mxfp8_are_torchaos_on_one_process(
    ranks: RankPool, tmp_path: Path, world_size: int, flags: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    wanted = torch.tensor(mixture_alone(str(tmp_path)), dtype=torch.float64)
    other = config_of(tmp_path, fp8="mx", router_aux_loss_coef=0.0, **flags)
    found = torch.tensor(ranks.run(train, world_size, other, STEPS), dtype=torch.float64)
    bound = SAME if world_size == 1 else CLOSE
    differences = (found / wanted - 1).abs().amax(0)
    assert (differences <= bound).all(), differences
