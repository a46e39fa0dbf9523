"""TrainConfig as a mapping, and the rules of usp.train.validate."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from usp.config import TrainConfig
from usp.fields import config_from_mapping
from usp.model.facts import ModelFacts
from usp.run.failures import nearest
from usp.train.resolve import resolve
from usp.train.validate import settle_batch, violations

FACTS = ModelFacts("some-model", num_heads=6, num_kv_heads=2, head_dim=16, vocab_size=384, windows=(0, 0))


def test_a_mapping_gives_back_the_configuration() -> None:
    config = TrainConfig(sp_ulysses=4, learning_rate=1e-4, data="corpus.jsonl")
    assert config_from_mapping(asdict(config), TrainConfig) == config


def test_keys_may_have_dashes_and_floats_may_be_what_yaml_reads() -> None:
    config = config_from_mapping(
        {"sp-ring": 2, "seq_len": 512, "learning-rate": "3e-4", "max-grad-norm": 1}, TrainConfig
    )
    assert config == TrainConfig(sp_ring=2, seq_len=512, learning_rate=3e-4, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"sp_ulises": 2}, r"unknown key 'sp_ulises' \(did you mean 'sp_ulysses'\?\)"),
        ({"qqq": 2}, "unknown key 'qqq'$"),
        ({"steps": "ten"}, "steps = 'ten' must be an integer"),
        ({"steps": 1.5}, "steps = 1.5 must be an integer"),
        ({"steps": True}, "steps = True must be an integer"),
        ({"learning-rate": "fast"}, "learning-rate = 'fast' must be a number"),
        ({"model": 7}, "model = 7 must be a string"),
        ({"sp-ring": 1, "sp_ring": 2}, "'sp_ring' is given twice"),
    ],
)
def test_a_wrong_mapping_is_refused(mapping: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config_from_mapping(mapping, TrainConfig)


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"seq_lenn.*steps"):
        config_from_mapping({"seq_lenn": 1, "steps": None}, TrainConfig)


def test_nearest_says_nothing_about_words_that_are_far() -> None:
    assert nearest("zigzga", ["zigzag", "striped"]) == " (did you mean 'zigzag'?)"
    assert nearest("other", ["zigzag", "striped"]) == ""


@pytest.mark.parametrize(
    ("changes", "world_size"),
    [
        ({}, 1),
        ({"sp_ulysses": 6, "seq_len": 24}, 6),
        ({"sp_ulysses": 4, "sp_ring": 2}, 8),
        ({"sp_ring": 2, "dp_replicate": 2}, 8),
        ({"sp_ulysses": 2, "global_batch_size": 12, "micro_batches": 3}, 8),
        ({"seq_len": 2, "hang_timeout": 86400.0}, 1),
        ({"warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": float("inf")}, 1),
    ],
)
def test_what_can_run_has_no_violations(changes: dict[str, object], world_size: int) -> None:
    assert violations(replace(TrainConfig(), **changes), world_size, FACTS) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ({"sp_ulysses": 3, "seq_len": 300}, 8, ["3 ranks must divide the world size 8"]),
        ({"dp_shard": 3, "sp_ring": 2}, 8, ["--dp-shard 3 x --sp-ring 2 = 6 ranks must equal the world size 8"]),
        ({"dp_shard": 0}, 1, ["--dp-shard = 0 must be at least 1, or -1"]),
        (
            {"sp_ulysses": 8, "seq_len": 800},
            8,
            ["6 query heads", "Use 1 to 6", "same 8 ranks, --sp-ulysses 4 --sp-ring 2"],
        ),
        ({"sp_layout": "zigzga"}, 1, ["--sp-layout = 'zigzga'", "did you mean 'zigzag'?"]),
        ({"sp_order": "ring-inner"}, 1, ["--sp-order = 'ring-inner'", "ring-outer, ulysses-outer"]),
        ({"attention_kernel": "flahs"}, 1, ["--attention-kernel = 'flahs'", "did you mean 'flash'?"]),
        ({"dtype": "float16"}, 1, ["--dtype = 'float16' must be one of auto, float32, bfloat16"]),
        ({"device": "gpu"}, 1, ["--device = 'gpu' must be one of auto, cpu, cuda"]),
        ({"steps": 0, "batch_size": -2}, 1, ["--steps = 0 must be at least 1", "--batch-size = -2"]),
        ({"learning_rate": float("nan")}, 1, ["--learning-rate = nan must be at least 0 and finite, or auto"]),
        ({"weight_decay": -0.1}, 1, ["--weight-decay = -0.1 must be at least 0 and finite"]),
        ({"weight_decay": float("inf")}, 1, ["--weight-decay = inf must be at least 0 and finite"]),
        ({"hang_timeout": float("inf")}, 1, ["--hang-timeout = inf must be 0 to 86400 seconds; 0 disables it"]),
        ({"hang_timeout": 1e300}, 1, ["must be 0 to 86400 seconds"]),
        ({"seq_len": 1}, 1, ["--seq-len = 1 must be at least 2"]),
        ({"global_batch_size": 6}, 4, ["multiple of the 4 data-parallel ranks", "use 4 or 8"]),
        ({"global_batch_size": 8, "batch_size": 2}, 4, ["--global-batch-size = 8 and --batch-size = 2", "give one"]),
        ({"global_batch_size": 3, "sp_ring": 3}, 4, ["must divide the world size 4"]),
        ({"train_tokens": 10**9, "steps": 5}, 4, ["--train-tokens = 1000000000 and --steps = 5", "give one"]),
        ({"train_tokens": -1}, 4, ["--train-tokens = -1 must be at least 0"]),
        ({"global_batch_size": -1}, 4, ["--global-batch-size = -1 must be at least 0"]),
        ({"plan": "auto"}, 1, ["--plan auto is only supported by train.py"]),
        ({"plan": "atuo"}, 1, ["--plan = 'atuo' must be one of none, auto, tune (did you mean 'auto'?)"]),
        ({"hardware": "h100"}, 1, ["--hardware = h100 is only used by --plan"]),
        ({"pp": 2}, 2, ["--micro-batches = 1 does not fill", "1f1b over 2 ranks must be at least 2, not 1: use 2"]),
        (
            {"pp": 4, "pp_schedule": "interleaved-1f1b", "micro_batches": 9, "batch_size": 12},
            4,
            [
                "--micro-batches = 9 must divide --batch-size = 12: use --batch-size 18",
                "must be a multiple of its 9 // 4 = 2 rounds, not 9: use 10",
                "8 pipeline stages need as many layers, but some-model has 2",
            ],
        ),
        (
            {"pp": 2, "pp_stages_per_rank": 4, "micro_batches": 2, "batch_size": 2},
            2,
            ["--pp-stages-per-rank = 4: stages per rank of 1f1b must be 1, not 4: use interleaved-1f1b"],
        ),
        (
            {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 4, "micro_batches": 2, "batch_size": 2},
            2,
            ["--pp 2 with --pp-schedule interleaved-1f1b of 4 stages a rank: 8 pipeline stages need as many layers"],
        ),
        (
            {"pp": 4, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 3, "micro_batches": 2, "batch_size": 2},
            4,
            ["micro-batches of interleaved-1f1b over 4 ranks must be at least 4, not 2: use 4"],
        ),
        ({"pp_stages_per_rank": 2}, 1, ["--pp-stages-per-rank = 2 schedules a pipeline, but --pp is 1: set --pp"]),
        ({"pp": 2, "pp_stages_per_rank": -1}, 2, ["--pp-stages-per-rank = -1 must be at least 0"]),
        (
            {"pp": 2, "pp_schedule": "zero-bubble", "ac": "full", "micro_batches": 2, "batch_size": 2},
            2,
            ["at least 2 x 2 - 1 = 3, not 2: use 3", "--zero = 3 frees", "use --zero 1", "use --ac none"],
        ),
        (
            {"pp": 2, "pp_schedule": "zero-bubble", "compile": True, "micro_batches": 4, "batch_size": 4, "zero": 1},
            2,
            ["--compile makes the backward of a layer one graph", "use --pp-schedule interleaved-1f1b"],
        ),
        (
            {"ac": "selective", "mlp_tile": 64, "compile": True},
            1,
            ["--mlp-tile = 64 keeps no matrix products of MLPs", "--ac selective has no effect with --compile"],
        ),
        (
            {"async_tp": True},
            1,
            ["--async-tp hides messages of --tp-sequence-parallel in layers of --compile: give both"],
        ),
        ({"max_grad_norm": 0.0}, 1, ["--max-grad-norm = 0.0 must be positive; inf disables clipping"]),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, object], world_size: int, said: list[str]) -> None:
    messages = "\n".join(violations(replace(TrainConfig(), **changes), world_size, FACTS))
    for part in said:
        assert part in messages


def test_the_global_batch_is_shared_by_the_data_parallel_ranks() -> None:
    asked = TrainConfig(sp_ulysses=2, dp_replicate=2, global_batch_size=12)
    assert settle_batch(asked, 8) == replace(asked, global_batch_size=0, batch_size=3)
    tokens = replace(asked, train_tokens=12 * 4096 * 7 + 1)
    assert settle_batch(tokens, 8) == replace(asked, global_batch_size=0, batch_size=3, steps=8)
    for unsettled in (replace(asked, global_batch_size=10), replace(asked, batch_size=2), TrainConfig(batch_size=2)):
        assert settle_batch(unsettled, 8) is unsettled


def test_all_violations_come_at_once() -> None:
    config = TrainConfig(sp_ulysses=8, sp_ring=3, seq_len=1001)
    assert len(violations(config, 16, FACTS)) == 2  # world size, heads


def test_rules_about_the_model_wait_for_a_model() -> None:
    assert violations(TrainConfig(sp_ulysses=64), 64, None) == []


def test_names_of_files_are_not_taken_for_options() -> None:
    """Check that a path that looks like an argument stays as it is, where the arguments around it become flags."""
    problems = resolve(TrainConfig(model="runs/seq_len=4096"), 1).problems
    assert [problem.partition(" is ")[0] for problem in problems] == ["--model runs/seq_len=4096"]
