"""What a training checkpoint holds beyond its tensors."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from usp.config import TrainConfig
from usp.optimizers import AdamW
from usp.train.checkpoints import TrainingState, random_state, restore_random_state, resume_changes, resume_violations

CPU = torch.device("cpu")
MODEL = LlamaConfig(hidden_size=64, num_hidden_layers=2, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})


def saved(config: TrainConfig, model: LlamaConfig = MODEL) -> TrainingState:
    state = TrainingState(
        step=20,
        tokens=4096,
        stream={"seed": 0},
        random={},
        config=asdict(config),
        model=model.to_dict(),
        evaluations={},
    )
    return TrainingState.from_extra(json.loads(json.dumps(state.to_extra())))


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]


def test_random_numbers_continue() -> None:
    random.gauss(0, 1)  # leaves the second one of a pair behind, in both generators that draw pairs
    np.random.normal()
    state = random_state(CPU)
    generator, state["torch"] = state["torch"], None
    state = json.loads(json.dumps(state)) | {"torch": generator}
    expected = draws()
    draws()
    restore_random_state(state, CPU)
    assert draws() == expected


def test_the_same_run_on_another_layout_continues() -> None:
    config = TrainConfig(steps=100)
    here = replace(config, sp_ring=4, dp_shard=2, batch_size=3, output="elsewhere")
    assert not resume_violations(saved(config), here, MODEL.to_dict())
    assert resume_changes(saved(config), here) == [
        "--batch-size = 3 (checkpoint: 1)",
        "--sp-ring = 4 (checkpoint: 1)",
        "--dp-shard = 2 (checkpoint: -1)",
    ]
    assert resume_changes(saved(config), replace(config, output="elsewhere")) == []
    earlier = saved(config)
    earlier.config.update(engine="fsdp2", lora_dropout=0.1)
    assert resume_changes(earlier, config) == ["--lora-dropout = 0.0 (checkpoint: 0.1)"]


def test_who_wrote_a_model_does_not_make_it_another() -> None:
    model = MODEL.to_dict() | {"transformers_version": "0", "_name_or_path": "elsewhere", "dtype": "bfloat16"}
    assert not resume_violations(saved(TrainConfig()), TrainConfig(), model)


def test_everything_that_must_hold_is_said_at_once() -> None:
    config = TrainConfig(steps=20)
    model = MODEL.to_dict() | {"hidden_size": 32, "vocab_size": 7}
    other_model, nothing_left = resume_violations(saved(config), config, model)
    assert "hidden_size = 32 (checkpoint: 64), vocab_size = 7 (checkpoint: 32000)" in other_model
    assert nothing_left == "--steps = 20 leaves nothing to do: the checkpoint is of step 20; use at least 21"


def test_a_finished_run_is_ended_and_no_longer_one_is() -> None:
    model = MODEL.to_dict()
    assert not resume_violations(saved(TrainConfig()), TrainConfig(steps=20), model, finished_too=True)
    (message,) = resume_violations(saved(TrainConfig()), TrainConfig(steps=19), model, finished_too=True)
    assert message == "--steps = 19 leaves nothing to do: the checkpoint is of step 20; use at least 20"


def test_what_is_not_of_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="is not of a training run: it lacks tokens, stream, random, config, model"):
        TrainingState.from_extra({"step": 3})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_state_before_the_first_step_is_the_one_that_torch_makes(device: str) -> None:
    def properties(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.device, torch.dtype, torch.Size]]:
        return {name: (value.device, value.dtype, value.shape) for name, value in state.items()}

    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.zeros(3, 2, device=device))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = AdamW(weight_decay=0.1).over([parameter])
        optimizer.step()
        assert properties(AdamW.first_state(parameter)) == properties(optimizer.state[parameter])
