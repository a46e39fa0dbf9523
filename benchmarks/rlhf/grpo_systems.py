"""The systems of `grpo_step`: one rank trains GRPO with rlhf.py or with TRL, and counts its CPU seconds by phase.

Both train the same folder's model on the same prompts with the same group size, response length, temperature, AdamW and
KL penalty, in float32, without activation checkpointing, in one optimizer step over the whole batch in one micro-batch,
for which both take the policy as the old one by default. TRL generates with transformers' `generate`, its default
without a server; with `Job.vllm` both decode with vLLM in their own processes. A rank has one core, and so one thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ENGINE = "weights to vLLM"
PHASES = ("generate", ENGINE, "inference", "train and rest")
TOKENS = "tokens"  # generated
CACHE_GIB = 1  # of vLLM


@dataclass(frozen=True)
class Job:
    """A run of `steps` steps of `prompts` prompts on each of which `group_size` responses are sampled."""

    folder: str  # has model/, prompts.jsonl and reward.py
    name: str  # of the folder that it writes, inside
    steps: int
    ranks: int
    prompts: int = 4
    group_size: int = 8
    new_tokens: int = 32
    learning_rate: float = 1e-5
    kl: float = 0.04
    vllm: bool = False  # decodes


class Phases:
    """CPU seconds of this process by phase, and the tokens that it generated, of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now, self.tokens = dict.fromkeys(PHASES, 0.0), 0
        self._begin = time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block to a phase, without the phases inside it."""
        inside, begin = sum(self._now.values()), time.process_time()
        yield
        self._now[name] += time.process_time() - begin - (sum(self._now.values()) - inside)

    def counted(
        self, name: str, function: Callable[..., Any], tokens: Callable[[Any], int] = lambda result: 0
    ) -> Callable[..., Any]:
        """Return a method that is counted to a phase; `tokens` returns how many its result has."""

        def call(*args: Any, **options: Any) -> Any:
            with self.phase(name):
                result = function(*args, **options)
            self.tokens += tokens(result)
            return result

        return call

    def end_step(self) -> None:
        end = time.process_time()
        rest = end - self._begin - sum(self._now.values())
        self.steps.append({**self._now, PHASES[-1]: self._now[PHASES[-1]] + rest, TOKENS: self.tokens})
        self._now, self.tokens, self._begin = dict.fromkeys(PHASES, 0.0), 0, end


def ours(job: Job, phases: Phases) -> None:
    """Train with rlhf.py's trainer."""
    from usp.commands.rlhf import main
    from usp.rlhf.roles.engine_model import EngineModel
    from usp.rlhf.roles.role_model import RoleModel
    from usp.rlhf.samples import Samples
    from usp.rlhf.trainer import RlhfTrainer

    step = RlhfTrainer.step

    def responses(samples: Samples) -> int:
        return int(sum(mask.sum() for mask in samples.values.get("mask", ())))

    def counted(trainer: RlhfTrainer, number: int) -> Any:
        record = step(trainer, number)
        phases.end_step()
        return record

    folder = Path(job.folder)
    flags: dict[str, Any] = {
        "model": folder / "model",
        "data": folder / "prompts.jsonl",
        "reward-function": f"{folder / 'reward.py'}:score",
        "output": folder / job.name,
        "prompts": job.prompts,
        "group-size": job.group_size,
        "max-new-tokens": job.new_tokens,
        "learning-rate": job.learning_rate,
        "options": f"kl={job.kl}",
        "steps": job.steps,
        "warmup-steps": 0,
        "sft-steps": 0,
        "checkpoint-every": 10**9,
        "device": "cpu",
    }
    if job.vllm:
        flags |= {"rollout-engine": "vllm", "rollout-cache": CACHE_GIB}
    argv = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    patches: dict[Any, Any] = {
        (RlhfTrainer, "step"): counted,
        (RoleModel, "generate"): phases.counted("generate", RoleModel.generate, responses),
        (RoleModel, "inference"): phases.counted("inference", RoleModel.inference),
        **{
            (EngineModel, name): phases.counted(ENGINE, getattr(EngineModel, name))
            for name in ("allocate", "take", "release")
        },
    }
    for (owner, name), function in patches.items():
        mock.patch.object(owner, name, function).start()
    if code := main(argv, os.environ):
        sys.exit(code)


def trl(job: Job, phases: Phases) -> None:
    """Train with TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder = Path(job.folder)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    sys.path.insert(0, job.folder)
    from reward import score

    def reward(prompts: list[str], completions: list[str], **unused: Any) -> list[float]:
        return [score(prompt, completion, "") for prompt, completion in zip(prompts, completions, strict=True)]

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            phases.end_step()

    config = GRPOConfig(
        output_dir=str(folder / job.name),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job.prompts * job.group_size // job.ranks,
        num_generations=job.group_size,
        max_completion_length=job.new_tokens,
        beta=job.kl,
        loss_type="grpo",
        learning_rate=job.learning_rate,
        max_steps=job.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        logging_steps=job.steps,
        dataloader_pin_memory=False,
        use_vllm=job.vllm,
        vllm_importance_sampling_correction=False,
    )
    if job.vllm:
        from trl.generation.vllm_generation import VLLMGeneration
        from vllm import _custom_ops

        # TRL loads weights into parameters, of which vLLM's linear layers on CPUs keep none: they pack them for oneDNN.
        _custom_ops._supports_onednn = False
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)  # else most of the memory
        VLLMGeneration.sync_weights = phases.counted(ENGINE, VLLMGeneration.sync_weights)
    GRPOTrainer._generate_single_turn = phases.counted(
        "generate", GRPOTrainer._generate_single_turn, lambda result: sum(map(len, result[0]))
    )
    prepare = GRPOTrainer._generate_and_score_completions
    GRPOTrainer._generate_and_score_completions = phases.counted("inference", prepare)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[EndOfStep()],
    )
    trainer.train()


def main() -> None:
    """Run a system on this rank; write its steps to a file."""
    system, text, output = sys.argv[1:]
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    phases = Phases()
    {"ours": ours, "trl": trl}[system](Job(**json.loads(text)), phases)
    Path(f"{output}-{rank}").write_text(json.dumps(phases.steps))


def job_text(job: Job) -> str:
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()
