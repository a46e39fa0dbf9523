"""Models that people train, from the first step to generation: mixtures of all parallelisms, checkpoints, exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from usp.hf.models import load_model_config, materialise, model_facts
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate
from usp.train.build import EngineRecipe, build_stages, first_weights
from usp.train.checkpoints import CHECKPOINTS

from .test_families import plain_steps, steps
from .test_families import write as write_tiny
from .test_hybrids import RUN, VOCAB, difference, difference_of, exported, losses_of, run

EXPERTS: dict[str, dict[str, Any]] = {
    "ep2 dp2 r2": {"ep": 2, "sp_ring": 2, "batch_size": 1},
    "ep4 u2 r2": {"ep": 4, "sp_ulysses": 2, "sp_ring": 2},
    "pp2 ep2 u2": {"pp": 2, "ep": 2, "sp_ulysses": 2, "micro_batches": 2},
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v3": EXPERTS,
    "gemma3_text": {
        "dp2 r2": {"sp_ring": 2, "batch_size": 1},
        "tp2 u2": {"tp": 2, "sp_ulysses": 2},
        "pp2 r2": {"pp": 2, "sp_ring": 2, "micro_batches": 2},
    },
    "glm4_moe": EXPERTS | {"tp2 ep2": {"tp": 2, "tp_sequence_parallel": True, "ep": 2, "sp_ring": 2}},
    "gpt_oss": EXPERTS,
    "qwen3_next": EXPERTS,
    "minimax": EXPERTS,
    "deepseek_v32": EXPERTS,
    "glm_moe_dsa": EXPERTS,
    "axk2": EXPERTS,
    "minimax_m3_vl_text": EXPERTS,
    "deepseek_v4": {name: EXPERTS[name] for name in ("ep2 dp2 r2", "ep4 u2 r2")},  # on no stages
}
TOKENS = 6
PROMPTS = [torch.arange(3, 20), torch.arange(40, 45), torch.tensor([9])]


# Without --exhaustive one run of each is resumed on another mixture, on two ranks. More of deepseek_v4:
# ../../hf/test_compressors.py; more generation: ../../rlhf/generation/test_families.py.
FEW: dict[str, list[dict[str, Any]]] = {
    "qwen3_next": [{"ep": 2, "batch_size": 1}, {"sp_ring": 2}],
    "deepseek_v4": [{"sp_ulysses": 2}, {"ep": 2, "sp_ring": 2}],
}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in MODELS]
)
@pytest.mark.slow(full=1)
def test_mixtures_checkpoints_exports_and_tokens(
    ranks: RankPool, tmp_path: Path, exhaustive: bool, model_type: str
) -> None:
    world_size, count = (4, 10) if exhaustive else (2, 2)
    mixtures = MODELS[model_type] if exhaustive else dict(enumerate(FEW[model_type]))
    if exhaustive or model_type == "qwen3_next":
        trains_as_transformers_does(ranks, model_type, tmp_path, count, exhaustive)
    resumes_and_exports(ranks, model_type, tmp_path, count, [*mixtures.values()], world_size)
    if exhaustive or model_type == "qwen3_next":
        generates_as_transformers_does(ranks, tmp_path / "resumed" / "model", exhaustive)


def trains_as_transformers_does(
    ranks: RankPool, model_type: str, folder: Path, steps_of_a_run: int, exhaustive: bool
) -> None:
    write_tiny(model_type, folder / "tiny")
    expected = plain_steps(model_type, steps_of_a_run)
    for mixture, flags in list(MODELS[model_type].items())[slice(None) if exhaustive else slice(1, 2)]:
        found = ranks.run(steps, 4, str(folder / "tiny"), flags, steps_of_a_run)
        assert not isinstance(found[0], str), (model_type, mixture, found[0])
        assert difference(found[0], expected) <= 1e-5, (model_type, mixture, difference(found[0], expected))


def resumes_and_exports(
    ranks: RankPool, model_type: str, folder: Path, steps_of_a_run: int, mixtures: list[dict[str, Any]], world_size: int
) -> None:
    """Train all steps under the first mixture, and the second half of them also under the second."""
    first, second = mixtures[:2]
    write_tiny(model_type, folder / "first", vocab_size=VOCAB)
    half = steps_of_a_run // 2
    config = replace(RUN, model=str(folder / "first"), steps=steps_of_a_run, checkpoint_every=half)
    (folder / "text.txt").write_text("A line of what is trained on.\n" * 100)
    config = replace(config, data=str(folder / "text.txt"), data_cache=str(folder / "cache"))
    rows = {"batch_size": 2}
    ranks.run(run, world_size, replace(config, **rows | first, output=str(folder / "whole")))
    checkpoint = folder / "whole" / CHECKPOINTS / f"step-{half:08}"
    resumed = replace(config, **rows | second, output=str(folder / "resumed"), resume=str(checkpoint))
    ranks.run(run, world_size, resumed)
    assert difference(losses_of(folder / "resumed"), losses_of(folder / "whole")[half:]) <= 1e-5, model_type
    whole, other = (exported(folder / name / "model") for name in ("whole", "resumed"))
    for name, parameter in whole.named_parameters():
        assert difference_of(other.get_parameter(name), parameter) <= 1e-5, (model_type, name)


def generated(folder: str, dims: ParallelDims) -> list[tuple[list[int], torch.Tensor]]:
    mesh = ParallelMesh.create(dims)
    recipe = EngineRecipe(load_model_config(folder), torch.float32, zero=None, optimizer=None)
    (stage,) = build_stages(recipe, mesh)
    materialise(stage, torch.device("cpu"))
    first_weights(stage, folder, seed=0)
    generator = Generator.of(stage, mesh, slots=2)
    found = generator.generate(PROMPTS, Generate(max_new_tokens=TOKENS, temperature=0), [0] * len(PROMPTS))
    return [(response.tokens.tolist(), response.logprobs) for response in found]


def generates_as_transformers_does(ranks: RankPool, folder: Path, exhaustive: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = []
    for ids in PROMPTS:
        whole = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), **options)
        with torch.no_grad():
            logprobs = model(whole, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])
        wanted.append((whole[0, len(ids) :].tolist(), logprobs[len(ids) - 1 :, 0]))
    grids = [ParallelDims(ring=2, ulysses=2)] if exhaustive else []
    if model_facts("", load_model_config(str(folder))).in_stages:
        grids.append(ParallelDims(pp=2, ulysses=2 if exhaustive else 1))
    for dims in grids:
        for of_rank in ranks.run(generated, dims.pp * dims.sp, str(folder), dims):
            assert [tokens for tokens, _ in of_rank] == [tokens for tokens, _ in wanted], dims
            for (_, found), (_, expected) in zip(of_rank, wanted, strict=True):
                assert (found - expected).abs().max() <= 1e-5, dims
