"""On-policy distillation: advantages from the transcript, a divergence that falls, and teachers that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as WordTokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.harness.ranks import RankPool
from tests.usp.rlhf.test_numerics import REWARD, alone, builder, given, weights_of
from tests.usp.tiny import CONFIGS, SIZES, drawn_model
from usp.parallel import ParallelMesh, ProcessGroups
from usp.rlhf.algorithms.critic_free import OnPolicyDistillation
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.config import RlhfConfig
from usp.rlhf.graph import Generate, ModelCall
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.prepare import prepare
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.copies import CopyOptions
from usp.rlhf.runtime.executor import Executor
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

STEPS, TEMPERATURE, FAMILY, RATE = 10, 0.8, "olmo2", 1e-2
OPTIONS = OnPolicyDistillation(
    generate=Generate(group_size=8, max_new_tokens=8, temperature=TEMPERATURE), reward=REWARD
)
SHOWN = ("tokens", "mask", "advantages", "weights")


def distil() -> tuple[list[float], dict[str, list[Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Return the divergence by step, the samples of the first, and the weights of both models before it."""
    graph = build_graph("distillation", OPTIONS)
    trained: dict[str, RoleModel] = {}
    build = builder(trained, family=FAMILY)
    models: dict[str, RoleModel] = {}

    def kept(call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        model = build(call, layout, mesh)
        model.spec = replace(model.spec, learning_rate=RATE)
        model.learning_rate = RATE
        models.setdefault(call.role, model)
        return model

    device = torch.device("cpu")
    executor = Executor(graph, alone(graph), CopyOptions(ProcessGroups(), kept, device, 1), collect=SHOWN)
    before = {name: weight.clone() for name, weight in weights_of(trained).items()}
    teacher = {name: weight.clone() for name, weight in models["teacher"].weights().items()}
    steps = [executor.run_step(given("distillation", 1), number, seed=number) for number in range(1, 1 + STEPS)]
    first = steps[0].samples
    assert first is not None
    return [step.metrics["teacher_kl"] for step in steps], {k: list(first[k]) for k in SHOWN}, before, teacher


def dense_logprobs(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_config(CONFIGS[FAMILY]()).double().eval()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
    with torch.no_grad():
        rows = (model(tokens.unsqueeze(0)).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    return torch.cat([rows.gather(1, tokens[1:, None])[:, 0], torch.zeros(1)])


@pytest.mark.slow
def test_the_divergence_falls_and_advantages_follow_from_the_transcript(ranks: RankPool) -> None:
    ((divergences, samples, before, teacher),) = ranks.run(distil, 1)
    student = {name.removeprefix("actor."): weight for name, weight in before.items()}
    for tokens, mask, advantages in zip(samples["tokens"], samples["mask"], samples["advantages"], strict=True):
        wanted = (dense_logprobs(teacher, tokens) - dense_logprobs(student, tokens)) * mask
        assert (advantages - wanted).norm() < 1e-5 * wanted.norm()
    assert divergences[0] > 1 and divergences[-1] < 0.7 * divergences[0], divergences


def test_a_teacher_must_read_the_tokens_of_the_policy(tmp_path: Path) -> None:
    sizes = LlamaConfig(**SIZES | {"vocab_size": 384, "max_position_embeddings": 2048})
    drawn_model(sizes).save_pretrained(tmp_path / "teacher")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+2?"}\n' * 70)
    config = RlhfConfig(algorithm="distillation", model="tiny", data=str(tmp_path / "prompts.jsonl"), sft_steps=0)
    config = replace(config, output=str(tmp_path / "run"))
    with pytest.raises(ConfigurationError, match="the role 'teacher' has no model: name it with --models"):
        prepare(config, Launch())
    config = replace(config, models=f"teacher={tmp_path / 'teacher'}")
    assert prepare(config, Launch()).roles["teacher"].source == str(tmp_path / "teacher")
    words = PreTrainedTokenizerFast(tokenizer_object=WordTokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    words.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigurationError, match=r"the teacher .* has another tokenizer than bytes"):
        prepare(config, Launch())
    with pytest.raises(ConfigurationError, match="--data"):
        prepare(replace(config, algorithm="grpo", models=""), Launch())
