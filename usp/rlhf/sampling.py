"""What a model generates while train.py trains it: responses to the prompts of a file, for `usp.train.trainer`.

The trained weights are gathered once for all tokens (`parallel.gathered`), and the ranks of a data-parallel group
generate together, in the layout of the training step. A response depends on its prompt, the seed and the weights alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from usp.config import TrainConfig
from usp.data.sources import DataFile
from usp.data.tokenizer import Ids, Tokenizer, as_document
from usp.hf.integrate import rotary_switch
from usp.hf.models import ModelConfig, context_length, stop_tokens
from usp.hf.stage import CausalLMStage
from usp.parallel import ParallelMesh, violation_of
from usp.parallel.fsdp import gathered
from usp.parallel.groups import gather_objects
from usp.rlhf.datasets import open_examples
from usp.rlhf.generation.generate import Generator, generation_problems
from usp.rlhf.graph import Generate
from usp.rlhf.samples import derived_seed
from usp.run.failures import ConfigurationError
from usp.train.prepare import PreparedRun
from usp.train.validate import with_flags

SLOTS = 32  # sequences that are decoded together


@dataclass(frozen=True)
class Sampler:
    """Generates what a step's model responds to `prompts`. zero: of the stage; work: how it generates."""

    prompts: tuple[Ids, ...]
    work: Generate
    seed: int
    tokenizer: Tokenizer
    zero: int

    def __call__(self, stage: CausalLMStage, mesh: ParallelMesh, step: int) -> list[str]:
        """Return the lines of a step, one for each prompt as JSON, on every rank. Collective."""
        numbers = range(mesh.rank("batch"), len(self.prompts), mesh.size("batch"))
        stage.eval()
        try:
            with gathered(stage, self.zero):
                generator = Generator.of(stage, mesh, slots=SLOTS, decode=self.tokenizer.decode, gathered=True)
                prompts = [torch.from_numpy(self.prompts[number]) for number in numbers]
                seeds = [derived_seed(self.seed, number) for number in numbers]
                found = generator.generate(prompts, self.work, seeds)
        finally:
            stage.train()
        own = dict[int, str]()
        for number, each in zip(numbers, found, strict=True):
            texts = {"prompt": self.tokenizer.show(self.prompts[number].tolist())}
            texts["response"] = self.tokenizer.decode(each.tokens.tolist())
            own[number] = json.dumps({"step": step, **texts, "finished": each.finished}, ensure_ascii=False)
        lines = {number: line for part in gather_objects(own) for number, line in part.items()}
        return [lines[number] for number in sorted(lines)]


def prepare_sampler(prepared: PreparedRun) -> Sampler:
    """Return what generates the samples that a run asks for. Raises ConfigurationError for prompts that cannot be read
    or do not fit the model, and a model that cannot generate."""
    config, model, tokenizer = prepared.config, prepared.model_config, prepared.tokenizer
    try:
        prompts = tuple(_prompts(config, model, tokenizer))
    except (ValueError, OSError) as error:
        raise ConfigurationError(with_flags("--sample-prompts: " + violation_of(error))) from error
    problem, switch = generation_problems(model), rotary_switch(model)
    if not problem and any(len(ids) <= (switch or 0) < len(ids) + config.sample_tokens for ids in prompts):
        problem = f"from {switch} tokens on, all keys rotate differently, and some responses would cross that"
    if problem:
        raise ConfigurationError(f"--sample-every: {config.model} cannot generate: {problem}; remove it")
    stops, most = stop_tokens(config.model, tokenizer.eos), config.sample_tokens
    work = Generate(max_new_tokens=most, temperature=config.sample_temperature, stop_ids=stops)
    return Sampler(prompts, work, config.seed, tokenizer, config.zero)


def _prompts(config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer) -> Iterator[Ids]:
    file = Path(config.sample_prompts).expanduser()
    longest = context_length(model) - 1
    if DataFile.of(file).format == "lines":
        examples = open_examples(str(file), ("prompt",), tokenizer, prompt_tokens=0, longest=longest, seed=0)
        yield from (examples[number].prompt for number in range(len(examples)))
        return
    lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file} holds no prompts")
    for line in lines:
        ids = as_document(tokenizer, tokenizer.encode(line), end=False)
        if len(ids) > longest:
            raise ValueError(f"a prompt of {len(ids)} tokens exceeds the model's context: {line[:60]!r}")
        yield ids
