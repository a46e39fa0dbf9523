"""A few lines before the first step of a run, what it sends, needs and takes as predicted, and a few after the last."""

from __future__ import annotations

import io
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from usp.config import CommonConfig, TrainConfig
from usp.data.tokenizer import TextTokenizer, Tokenizer
from usp.hf.tokenizers import BESIDE
from usp.parallel import Hardware, latest
from usp.predict.devices import hardware_here
from usp.predict.job import Job
from usp.predict.memory import largest_footprint
from usp.predict.seconds import step_seconds
from usp.predict.traffic import stage_units, step_traffic
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.run.metrics import count, seconds, size

from .checkpoints import ADAPTER, CHECKPOINTS, MODEL
from .prepare import PreparedRun
from .resolve import job_of

WIDTH = 120


def predicted_job(config: TrainConfig, prepared: PreparedRun) -> Job | None:
    """Return the step of a stage for the formulas; None where they do not apply."""
    try:
        return job_of(config, prepared.model_config, prepared.launch.world_size, prepared.shape)
    except ConfigurationError:
        return None


def predicted_lines(job: Job, prepared: PreparedRun) -> list[str]:
    """Return the summary of a step on this machine; empty for a model without formulas."""
    device = prepared.device
    if job.model.facts.formula_violation:
        return []
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    try:
        hardware = hardware_here("auto", device, prepared.launch)
    except ValueError:  # unknown: `usp calibrate` measures it
        hardware = None
    return run_summary(job, memory, hardware)


def run_summary(job: Job, memory_bytes: int | None, hardware: Hardware | None) -> list[str]:
    """Return the lines of a table for the first rank of the pipeline stage that needs the most memory.

    memory_bytes: of a device; None if it is not a GPU. hardware: the node; None if it is not known.
    """
    table = Table.grid(padding=(0, 2))
    for row in _rows(job, memory_bytes, hardware):
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(table)
    return ["predicted:", *(f"  {line.rstrip()}" for line in text.getvalue().splitlines())]


def next_steps(
    program: str, config: CommonConfig, folder: Path, launch: Launch, tokenizer: Tokenizer, done: int, kind: str
) -> Iterator[str]:
    """Yield how to load, serve and continue a run that has ended. program: train or rlhf. kind: of AutoModelFor."""
    model, beside = shlex.quote(str(folder / MODEL)), folder / BESIDE
    again = f"{_command(program, launch)} --config {shlex.quote(str(folder / 'config.yaml'))}"
    yield f"run: {folder}, {done} steps"
    if config.lora_rank and not config.lora_merge:
        scaled = getattr(config, "rope_scaling", "none") != "none"
        other = f', config=AutoConfig.from_pretrained("{folder / ADAPTER}")' if scaled else ""
        base = f'AutoModelFor{kind}.from_pretrained("{config.model}"{other})'
        if not getattr(config, "add_tokens", ""):  # with which the base may have too few rows
            yield f'load: PeftModel.from_pretrained({base}, "{folder / ADAPTER}")'
        merge = f"{again} --output {shlex.quote(str(folder))} --resume auto --lora-merge"
        yield f"serve: a whole model, which is written by {merge}"
    elif kind == "SequenceClassification":
        yield f'load: AutoModelFor{kind}.from_pretrained("{folder / MODEL}"), or rlhf.py --reward-model {model}'
    else:
        yield f'load: AutoModelFor{kind}.from_pretrained("{folder / MODEL}")'
        in_model = isinstance(tokenizer, TextTokenizer)
        yield f"serve: vllm serve {model}" + ("" if in_model else f" --tokenizer {shlex.quote(str(beside))}")
        if in_model and tokenizer.chats is not None:
            yield f"chat: transformers serve {model}, and in another terminal transformers chat {model}"
    if latest(folder / CHECKPOINTS) is None:
        yield "continue: not possible, because --checkpoint-every 0 keeps no checkpoint"
    elif getattr(config, "curriculum", ()):
        yield f"continue: add a stage to {folder / 'config.yaml'}, then {again} --resume {shlex.quote(str(folder))}"
    else:
        yield f"continue: {again} --resume {shlex.quote(str(folder))} --steps {2 * done}"


def _command(program: str, launch: Launch) -> str:
    """Return how `program` was started, as a script or as a console script, on as many ranks."""
    name = f"usp-{program}"
    installed, hosts = Path(sys.argv[0]).name == name, launch.world_size // launch.local_world_size
    if not launch.rendezvous:
        return name if installed else f"python {program}.py"
    meeting = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if hosts > 1 else ""
    script = f"--no-python {name}" if installed else f"{program}.py"
    return f"torchrun {meeting}--nproc-per-node {launch.local_world_size} {script}"


def _rows(job: Job, memory_bytes: int | None, hardware: Hardware | None) -> Iterator[tuple[str, str]]:
    config = job.config
    memory, rank = largest_footprint(job)
    if job.world_size > 1:
        over = f"ZeRO-{config.zero} over {job.degree('fsdp')} ranks" if config.zero else "all on every rank of dp x sp"
        parameters = sum(stage_units(job, stage).shard for stage in job.stages(rank))
        yield "sharding", f"{over}, {count(parameters)} of {count(job.model.numel)} parameters on a rank"
    peak = memory.peak
    parts = {"parameters": peak.parameters, "gradients": peak.gradients, "optimizer": peak.optimizer}
    parts |= {"unsharded": peak.whole, "activations": peak.activations + peak.transient}
    of_device = f" of {size(memory_bytes)}" if memory_bytes else ""
    host = f"; {size(memory.host)} of host memory" if memory.host else ""
    yield "memory", f"{size(peak.total)}{of_device}: {_listed(parts)}{host}"
    sent = Counter[str]()
    for part in step_traffic(job, rank):
        sent[part.axis] += part.nbytes
    if sent:
        yield "sent", f"{size(sent.total())} per step and rank: {_listed(sent)}"
    if hardware is not None:
        step = step_seconds(job, hardware)
        tokens = config.seq_len * config.batch_size * job.dims.batch / step.total
        speed = f"{seconds(step.total)} on {hardware.name}, {count(tokens)} tokens/s, MFU {step.mfu:.0%}"
        yield "step", f"{speed}, bound by {step.bound}"


def _listed(parts: Mapping[str, int]) -> str:
    total = sum(parts.values())
    return ", ".join(f"{name} {size(n)}" for name, n in sorted(parts.items(), key=lambda x: -x[1]) if 100 * n >= total)
