"""An optimizer is one value: no other file names it, and rules, predictions and runs follow from a new one's entry."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.test_architecture import PACKAGES, ROOT
from usp.config import TrainConfig
from usp.optimizers import OPTIMIZERS
from usp.train.validate import violations

NEW = """
from dataclasses import dataclass
import torch
from usp.optimizers import OPTIMIZERS, Optimizer

@dataclass(frozen=True)
class Signs:
    beta: float

    @staticmethod
    def of(config):
        return Signs(config.adam_beta1)

    def over(self, parameters, matrices, mesh):
        return SignDescent([{"params": list(parameters)}], {"lr": 0.0, "beta": self.beta})

    @staticmethod
    def first_state(parameter, matrix=False):
        return {"direction": torch.zeros_like(parameter.detach())}

class SignDescent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter] or Signs.first_state(parameter)
                self.state[parameter] = state
                state["direction"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.sub_(state["direction"].sign(), alpha=group["lr"])

OPTIMIZERS["signs"] = Optimizer("signs", Signs.of, ("adam_beta1",), "The signs of a momentum", states=1)

import sys
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.predict.memory import footprint
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of
from usp.train.validate import violations

for changes in ({"adam_eps": 1e-6}, {"muon_momentum": 0.5}, {"optimizer": "sign"}):
    print(*violations(TrainConfig(**{"optimizer": "signs"} | changes), 1, None), sep=" | ")
config = TrainConfig(seq_len=256, device="cpu", optimizer="signs")
memory = footprint(job_of(config, load_model_config("tiny"), 2), 0)
run = dry_run(config, 2)
print(memory.optimizer == memory.gradients, abs(memory.parameters + memory.optimizer - run.start_bytes) < 2**12)
"""


def test_no_other_file_names_an_optimizer() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} names {node.value}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in ("usp/optimizers.py", "usp/config.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in OPTIMIZERS
    ]
    assert not found, "\n".join(found)


def test_what_an_optimizer_lacks_is_refused() -> None:
    config = TrainConfig(optimizer="muon", optim_offload=True)
    assert violations(config, 1, None) == [
        "--optimizer muon multiplies matrices, slowly on the host: --optim-offload needs --optimizer adamw",
    ]
    assert not violations(TrainConfig(optimizer="muon", muon_momentum=0.5, adam_eps=1e-6), 1, None)


@pytest.mark.slow
def test_a_new_optimizer_is_one_entry() -> None:
    run = subprocess.run([sys.executable, "-c", NEW], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "--adam-eps = 1e-06 is an option of --optimizer adamw or adamw-bf16 or muon: remove it",
        "--muon-momentum = 0.5 is an option of --optimizer muon: remove it",
        "--optimizer = 'sign' must be one of adamw, adamw-bf16, muon, signs (did you mean 'signs'?)",
        "True True",
    ]
