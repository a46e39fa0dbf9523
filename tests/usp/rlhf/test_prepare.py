"""From flags to what a run does, before any communication."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import GenerationConfig, LlamaConfig

from tests.usp.tiny import SIZES, drawn_model
from usp.rlhf.config import RlhfConfig
from usp.rlhf.generation import vllm
from usp.rlhf.graph import Generate
from usp.rlhf.plan.plan import to_mapping
from usp.rlhf.prepare import prepare
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch


def generate_of(config: RlhfConfig) -> Generate:
    work = prepare(config, Launch()).graph["actor_generate"].work
    assert isinstance(work, Generate)
    return work


@pytest.mark.slow
def test_responses_end_as_the_tokenizer_the_generation_config_and_the_flags_say(tmp_path: Path) -> None:
    model = drawn_model(LlamaConfig(**SIZES | {"vocab_size": 384, "max_position_embeddings": 2048}))
    model.generation_config = GenerationConfig(eos_token_id=[5, 9])
    model.save_pretrained(tmp_path / "model")
    config = RlhfConfig(model=str(tmp_path / "model"), tokenizer="bytes", output=str(tmp_path / "run"))
    assert generate_of(config).stop_ids == (1, 5, 9)
    (tmp_path / "model" / "generation_config.json").rename(tmp_path / "kept.json")
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields | {"eos_token_id": 6}))
    assert generate_of(config).stop_ids == (1, 6)
    (tmp_path / "kept.json").rename(tmp_path / "model" / "generation_config.json")
    asked = generate_of(replace(config, stop_ids="17, 9", stop='["</a>", "\\n"]'))
    assert asked.stop_ids == (1, 5, 9, 17) and asked.stop_strings == ("</a>", "\n")
    assert generate_of(replace(config, model="tiny", stop="Q:")).stop_strings == ("Q:",)
    for changes, text in (
        ({"stop_ids": "400"}, "stop id 400 must be from 0 to 383"),
        ({"stop_ids": "a"}, "--stop-ids = a must be token ids"),
        ({"stop": "[3]"}, "must be a text, or a JSON list of texts"),
        ({"stop": "x", "algorithm": "sft"}, "--stop = x is for generated responses, and sft has none"),
        ({"eager_decoding": True, "algorithm": "sft"}, "--eager-decoding is for generated responses"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(replace(config, **changes), Launch())


@pytest.mark.slow
def test_plans_are_checked_against_the_models_before_anything_runs(tmp_path: Path) -> None:
    config = RlhfConfig(model="mixtral-tiny", output=str(tmp_path / "run"))
    four = Launch(world_size=4, local_world_size=4)
    for plan in ("heuristic", "flattening"):
        calls = prepare(replace(config, plan=plan), four).plan.calls
        assert (calls["actor_train"].zero, calls["actor_train"].dims.tp) == ((1, 4) if plan == "heuristic" else (3, 1))
    calls = prepare(replace(config, ep=4, sp_ulysses=2), four).plan.calls
    assert {calls[name].dims.ep for name in ("actor_generate", "ref_inference", "actor_train")} == {4}
    for changes, text in (
        ({"ep": 3}, "ep=3 must divide"),
        ({"model": "tiny", "ep": 2}, "ep=2 shards experts, and tiny has none"),
        ({"tp": 2}, "needs tp_sequence_parallel=True in training"),
        ({"ep": 2, "zero": 0}, "use zero=1"),
        ({"ep": 2, "plan": "heuristic", "sft_steps": 0}, "--ep = 2 is not used by --plan heuristic"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(replace(config, **changes), four)


@pytest.mark.slow
def test_what_an_engine_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    config = RlhfConfig(model="mixtral-tiny", device="cpu", output=str(tmp_path / "run"), plan="separation")
    four = Launch(world_size=4, local_world_size=4)
    engine = replace(config, rollout_engine="vllm", rollout="tp=2")
    plan, file = prepare(engine, four).plan, tmp_path / "plan.yaml"
    assert plan["actor_generate"].engine == "vllm"
    file.write_text(yaml.safe_dump(to_mapping(plan)))
    for changed, text in (
        (replace(config, rollout_cache=2), "that of vLLM, which no call decodes with"),
        (replace(engine, rollout="tp=2,ep=2"), "vLLM's experts on CPUs do not know .* ep=2 divides them: use ep=1"),
        (replace(engine, cache_tokens=64), "use --rollout-cache instead"),
        (replace(engine, eager_decoding=True), "of our own decoding, and no call decodes with it"),
        (replace(engine, delta_updates=True, lora_rank=4), "an engine is sent adapters alone"),
        (replace(config, plan=str(file), router_replay=True), "the experts that tokens chose, which vLLM in the run"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(changed, four)


def test_a_plan_file_may_name_calls_that_a_run_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RlhfConfig(sft_steps=0, output=str(tmp_path / "run"), options="old_logprobs=recompute", offload=True)
    file = tmp_path / "plan.yaml"
    plan = to_mapping(prepare(config, Launch()).plan)
    assert "actor_inference" in plan["calls"] and plan["offload"] == ["ref"]
    file.write_text(yaml.safe_dump(plan))
    config = replace(config, plan=str(file), offload=False)
    prepared = prepare(replace(config, options="kl=0"), Launch())
    assert {*plan["calls"]} - {*prepared.plan.calls} == {"actor_inference", "ref_inference"}
    assert not prepared.plan.offload
    assert capsys.readouterr().err == (
        f"warning: --plan = {file} has layouts for actor_inference, ref_inference, which this run does not call: "
        "not needed\n"
    )
    plan["calls"]["actor_trian"] = plan["calls"].pop("actor_train")  # which may be misspelt
    file.write_text(yaml.safe_dump(plan))
    with pytest.raises(ConfigurationError, match=r"no layout for actor_train; layouts for unknown .*trian"):
        prepare(config, Launch())
