"""The configuration of a training run: one flat frozen dataclass, and the mapping that a file holds.

`TrainConfig` is the single list of train.py's knobs; rlhf.py's (`usp.rlhf.config`) shares its first and last part. The
command line makes a flag of every field (`sp_ring` is `--sp-ring`) and shows the string under the field as its help; a
YAML or TOML file holds the same keys. Nothing here looks at the machine: what a configuration must satisfy is in
`usp.train.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from tyro.conf import arg

from attention import KERNEL_NAMES, LAYOUTS
from parallel import PP_SCHEDULES, SP_ORDERS
from usp.data.documents import TEXT_FIELD
from usp.presets import PRESETS
from usp.run.failures import nearest

C = TypeVar("C")

ENGINES = ("fsdp2", "deepspeed")
AC_MODES = ("none", "attention-saved", "full")
PLANS = ("none", "auto")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")

MODEL_HELP = f"A preset, built with random weights ({', '.join(PRESETS)}), or a local transformers checkpoint folder."


def one_of(choices: tuple[str, ...]) -> Any:
    """Show the choices in the help; `usp.train.validate` refuses the others together with every other mistake."""
    return arg(metavar="{" + ",".join(choices) + "}")


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work, for train.py and rlhf.py alike."""

    sp_ulysses: int = 1
    """Ulysses degree: ranks that trade sequence for heads in an all-to-all. Best inside one host."""
    sp_ring: int = 1
    """Ring degree: ranks that pass keys and values around while they compute. May cross hosts."""
    sp_layout: Annotated[str, one_of(LAYOUTS)] = "zigzag"
    """Which positions of a sequence each rank owns. zigzag and striped balance the causal mask."""
    sp_order: Annotated[str, one_of(SP_ORDERS)] = "ring-outer"
    """Which of the two takes neighbouring ranks: ring-outer keeps Ulysses among neighbours."""
    dp_shard: int = -1
    """Data-parallel degree whose ranks also share the parameters (FSDP). -1 takes the ranks that are left."""
    dp_replicate: int = 1
    """Data-parallel degree whose ranks each keep a whole copy of the sharded parameters (HSDP)."""
    tp: int = 1
    """Tensor-parallel degree: ranks that share every matrix. Best inside one host; heads are divided by it first."""
    tp_sequence_parallel: bool = False
    """Between matrices, share the tokens over the tensor-parallel ranks too (Megatron's sequence parallelism)."""
    pp: int = 1
    """Pipeline-parallel degree: groups of ranks that each hold some of the layers."""
    zero: int = 3
    """ZeRO stage: 0 shards nothing over dp x sp, 1 the optimiser, 2 gradients too, 3 parameters too."""


@dataclass(frozen=True)
class RunConfig:
    """Where a run computes, and what it leaves, for train.py and rlhf.py alike."""

    attention_kernel: Annotated[str, one_of(KERNEL_NAMES)] = "auto"
    """Attention block kernel. auto: the fastest one that serves this device, dtype and model."""
    dtype: Annotated[str, one_of(DTYPES)] = "auto"
    """Computation dtype; weights and optimiser stay float32. auto: bfloat16 on CUDA, float32 on CPU."""
    device: Annotated[str, one_of(DEVICES)] = "auto"
    """Where to train. auto: CUDA where there is a GPU, otherwise CPU."""

    output: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: runs/<time>-<model>)")] = ""
    """The run's folder: configuration, metrics, TensorBoard, checkpoints, and the trained model."""
    log_every: int = 10
    """Print a line every this many steps. metrics.jsonl holds every step."""
    checkpoint_every: int = 100
    """Steps between checkpoints to resume from; the last step has one too. 0: only when a signal asks to stop."""
    keep_checkpoints: int = 2
    """How many of them to keep, the newest."""
    resume: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """Continue a run from its newest checkpoint (or the one named), on the same or another layout and world size."""
    hang_timeout: float = 600.0
    """Seconds without progress after which the run stops and names what hangs where. 0: wait for ever."""
    wandb_project: Annotated[str, arg(metavar="NAME", help_behavior_hint="(optional)")] = ""
    """Log to this Weights & Biases project too (needs wandb)."""


@dataclass(frozen=True)
class _Training:
    """What is train.py's own."""

    pp_schedule: Annotated[str, one_of(PP_SCHEDULES)] = "1f1b"
    """Order of the micro-batches in the pipeline. The last two give each rank two stages, for a smaller bubble."""
    ep: int = 1
    """Expert-parallel degree: over how many of the dp_shard x ring x ulysses x tp ranks experts are spread."""
    engine: Annotated[str, one_of(ENGINES)] = "fsdp2"
    """What shards and updates the weights: torch's FSDP2, or DeepSpeed (needs the deepspeed extra)."""

    plan: Annotated[str, one_of(PLANS)] = "none"
    """auto: choose degrees, ZeRO stage, activation checkpointing and micro-batches, by predicted time and memory."""
    hardware: Annotated[str, arg(metavar="auto|NODE|PATH.json")] = "auto"
    """For --plan auto: what the devices and links are, a known node or a file of `python -m usp calibrate`."""

    model: Annotated[str, arg(metavar="PRESET|PATH", help=MODEL_HELP)] = "tiny"
    data: Annotated[str, arg(metavar="stdlib|PATH")] = "stdlib"
    """A text file, a JSONL or Parquet file, or a folder of them. stdlib: the sources of Python's own library."""
    data_field: str = TEXT_FIELD
    """The key (JSONL) or column (Parquet) that holds a document's text."""
    tokenizer: Annotated[str, arg(metavar="bytes|PATH")] = "bytes"
    """A local transformers tokenizer folder. bytes: one token per byte, as ByT5 counts them."""

    seq_len: int = 4096
    """Tokens per sequence, over all ranks that share it."""
    batch_size: int = 1
    """Sequences per data-parallel rank and step."""
    global_batch_size: int = 0
    """Sequences per step over all ranks, instead of --batch-size."""
    micro_batches: int = 1
    """Parts of batch_size that pass one after another: gradient accumulation, and what fills a pipeline."""
    steps: int = 100
    """Optimiser steps."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW: reached after the warm-up, then a cosine down to a tenth of it."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, on matrices only."""
    adam_beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    adam_beta2: float = 0.95
    """AdamW's decay of the mean of their squares."""
    adam_eps: float = 1e-8
    """What AdamW adds to the root of that mean."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm. inf: never clip."""
    router_aux_loss_coef: float = -1.0
    """Weight of the load-balancing loss of mixtures of experts. -1: what the model's configuration says."""
    seed: int = 0
    """Fixes the initial weights and the order of the data."""

    ac: Annotated[str, one_of(AC_MODES)] = "none"
    """Activation checkpointing: recompute layers in the backward; attention-saved keeps attention's results."""
    ac_offload: bool = False
    """Keep what activation checkpointing keeps in the host's memory."""
    loss_chunk: int = 2048
    """Tokens whose logits exist at a time, on each rank."""
    mlp_tile: int = 0
    """Tokens that pass through an MLP at a time, recomputed in the backward. 0: all of a rank's tokens at once."""
    profile: Annotated[str, arg(metavar="STEP|FIRST:LAST", help_behavior_hint="(optional)")] = ""
    """Steps to trace; the traces go to the run's folder, for chrome://tracing or Perfetto."""


@dataclass(frozen=True)
class TrainConfig(RunConfig, _Training, ParallelConfig):
    """Train a causal language model with its sequences split over a Ulysses x Ring mesh, inside data, tensor, pipeline
    and expert parallelism.

    Start it with torchrun, for example: torchrun --nproc-per-node 8 train.py --sp-ulysses 4 --sp-ring 2
    """


def config_from_mapping(mapping: Mapping[str, Any], kind: type[C]) -> C:
    """The configuration of class `kind` whose keys `mapping` gives, defaults elsewhere; dashes are underscores.

    Raises ValueError that lists every unknown key with its nearest match,
    every key given twice, and every value of a wrong kind.
    """
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            problems.append(f"unknown key {key!r}{nearest(name, hints)}")
        elif name in values:
            problems.append(f"{key!r} is given twice (dashes and underscores are the same key): keep one")
        else:
            try:
                values[name] = _convert(value, hints[name])
            except (TypeError, ValueError):
                problems.append(f"{key} = {value!r} must be {_kind(hints[name])}")
    if problems:
        raise ValueError("; ".join(problems))
    return kind(**values)


def config_to_mapping(config: Any) -> dict[str, Any]:
    """Every field by its name; `config_from_mapping` reads it back to an equal configuration."""
    return asdict(config)


def flag(name: str) -> str:
    """The command line's name of a field: `sp_ring` is `--sp-ring`."""
    return "--" + name.replace("_", "-")


def _convert(value: Any, kind: type) -> Any:
    """`value` as `kind`, where that loses nothing. YAML reads 3e-4 as a string, so strings may hold a float."""
    if isinstance(value, bool) != (kind is bool):
        raise TypeError
    if kind is float and isinstance(value, (int, float, str)):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError
    return value


def _kind(kind: type) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
