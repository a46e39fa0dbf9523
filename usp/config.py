"""Training configuration: one flat frozen dataclass, and its conversion to and from a mapping.

`TrainConfig` lists every option of train.py; rlhf.py (`usp.rlhf.config`) shares all but `_Training`. Each field
is a flag (`sp_ring` is `--sp-ring`, the string below it is its help) and a key of a YAML or TOML file. Nothing here
depends on the machine; the rules that a configuration must satisfy are in `usp.train.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, get_type_hints

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from attention import KERNEL_NAMES, LAYOUTS
from parallel import PP_SCHEDULES, SP_ORDERS
from usp.curriculum import CurriculumStage, read_stages, stages_from, token_count
from usp.data.files import TEXT_FIELD
from usp.presets import PRESETS
from usp.run.failures import nearest

C = TypeVar("C")

ENGINES = ("fsdp2", "deepspeed")
OPTIMIZERS = ("adamw", "muon")
AC_MODES = ("none", "selective", "attention-saved", "full")
PLANS = ("none", "auto")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
BOS = ("auto", "always", "never")
PACKINGS = ("auto", "cut", "whole")
ROUTER_BALANCES = ("step", "micro-batch")
ALL_LINEAR = "all-linear"  # LoRA targets
LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")
ROPE_SCALINGS = ("none", "yarn", "linear", "ntk")
TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}

MODEL_HELP = f"Preset with random weights ({', '.join(PRESETS)}), or a local transformers checkpoint directory."


def one_of(choices: tuple[str, ...]) -> Any:
    """Show `choices` in the help; `usp.train.validate` checks the value, to report it with all other violations."""
    return arg(metavar="{" + ",".join(choices) + "}")


TOKENS = PrimitiveConstructorSpec(
    nargs=1,
    metavar="N|NK|NM",
    instance_from_str=lambda words: token_count(words[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [str(value)],
)

STAGES = PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATH.yaml",
    instance_from_str=lambda words: read_stages(words[0]),
    is_instance=lambda value: isinstance(value, tuple),
    str_from_instance=lambda value: [f"{len(value)} stages" if value else ""],
)


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel degrees and sharding, shared by train.py and rlhf.py."""

    sp_ulysses: int = 1
    """Ulysses degree: sequence parallelism by all-to-all over attention heads. Best kept within a host."""
    sp_ring: int = 1
    """Ring degree: sequence parallelism by passing keys and values around a ring. May span hosts."""
    sp_layout: Annotated[str, one_of(LAYOUTS)] = "zigzag"
    """Assignment of sequence positions to ranks. zigzag and striped balance the causal mask."""
    sp_order: Annotated[str, one_of(SP_ORDERS)] = "ring-outer"
    """Nesting of the two degrees. ring-outer: the ranks of a Ulysses group are neighbors."""
    dp_shard: int = -1
    """Sharded data-parallel degree (FSDP). -1: all remaining ranks."""
    dp_replicate: int = 1
    """Replicated data-parallel degree: number of copies of the sharded parameters (HSDP)."""
    tp: int = 1
    """Tensor-parallel degree. Best kept within a host; splits the attention heads before Ulysses does."""
    tp_sequence_parallel: bool = False
    """Also shard activations over the sequence between tensor-parallel layers (Megatron sequence parallelism)."""
    pp: int = 1
    """Pipeline-parallel degree."""
    zero: int = 3
    """ZeRO stage, over dp x sp: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""


@dataclass(frozen=True)
class RunConfig:
    """Device, logging and checkpointing, shared by train.py and rlhf.py."""

    attention_kernel: Annotated[str, one_of(KERNEL_NAMES)] = "auto"
    """Attention kernel. auto: the fastest that can, by the rates of this GPU; flash: the fastest flash-attn."""
    dtype: Annotated[str, one_of(DTYPES)] = "auto"
    """Compute dtype; weights and optimizer states stay float32. auto: bfloat16 on CUDA, float32 on CPU."""
    device: Annotated[str, one_of(DEVICES)] = "auto"
    """Device type. auto: CUDA if available, otherwise CPU."""
    export_dtype: Annotated[str, one_of(DTYPES)] = "auto"
    """Data type of the exported model. auto: the compute dtype, for adapters float32. Checkpoints hold float32."""

    output: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: runs/<time>-<model>)")] = ""
    """Output directory for the configuration, metrics, TensorBoard logs, checkpoints and final model."""
    log_every: int = 10
    """Steps between log lines. metrics.jsonl records every step."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is saved too. 0: save only when a signal stops the run."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep; older ones are deleted."""
    resume: Annotated[str, arg(metavar="auto|PATH", help_behavior_hint="(optional)")] = ""
    """Run directory or checkpoint to resume from; layout and world size may change. auto: the run in --output."""
    hang_timeout: float = 600.0
    """Seconds without progress before the run is aborted with a report of where each rank hangs. 0: no limit."""
    wandb_project: Annotated[str, arg(metavar="NAME", help_behavior_hint="(optional)")] = ""
    """Also log to this Weights & Biases project (requires wandb)."""


@dataclass(frozen=True)
class MemoryConfig:
    """Memory of activations, shared by train.py and rlhf.py."""

    ac: Annotated[str, one_of(AC_MODES)] = "none"
    """Activation checkpointing. full: recompute each layer; attention-saved: all but attention; selective: neither
    attention nor matrix products."""
    ac_offload: bool = False
    """Offload checkpointed activations to host memory."""
    loss_chunk: int = 2048
    """Tokens per rank whose logits are materialized at a time."""
    mlp_tile: int = 0
    """Tokens per MLP tile, recomputed in the backward. 0: no tiling."""


@dataclass(frozen=True)
class RouterConfig:
    """The load-balancing loss of mixtures of experts, shared by train.py and rlhf.py."""

    router_aux_loss_coef: float = -1.0
    """MoE load-balancing loss coefficient. -1: router_aux_loss_coef of the model configuration."""
    router_balance: Annotated[str, one_of(ROUTER_BALANCES)] = "step"
    """Tokens that the load-balancing loss covers. step: with micro-batches, costs a forward pass that only counts."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate after its warmup, shared by train.py and rlhf.py."""

    lr_schedule: Annotated[str, one_of(LR_SCHEDULES)] = "cosine"
    """Learning rate after the warmup. wsd: constant, then a linear decay in the last --lr-decay-steps."""
    lr_final: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    lr_decay_steps: int = -1
    """Steps of the decay of --lr-schedule wsd. -1: a tenth of all steps."""


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters, shared by train.py and rlhf.py."""

    lora_rank: int = 0
    """Rank of LoRA adapters, which are trained instead of the model's weights (requires peft). 0: no adapters."""
    lora_alpha: int = 0
    """Scale of the adapters: their output is multiplied by alpha / rank. 0: twice the rank."""
    lora_targets: Annotated[str, arg(metavar="all-linear|NAME,NAME,...")] = ALL_LINEAR
    """Linear layers that get adapters, such as q_proj,v_proj. all-linear: all of them, but no experts."""
    lora_merge: bool = False
    """Also export the model with the adapters merged into its weights."""


@dataclass(frozen=True)
class _Training:
    """Options of train.py only."""

    pp_schedule: Annotated[str, one_of(PP_SCHEDULES)] = "1f1b"
    """Pipeline schedule. interleaved-1f1b and zero-bubble run two stages per rank, for a smaller bubble."""
    ep: int = 1
    """Expert-parallel degree; divides dp_shard x ring x ulysses x tp."""
    engine: Annotated[str, one_of(ENGINES)] = "fsdp2"
    """Training engine: PyTorch FSDP2, or DeepSpeed (requires the deepspeed extra)."""
    optim_offload: bool = False
    """Keep optimizer states, float32 weights and their gradients in host memory, and update the weights there."""

    plan: Annotated[str, one_of(PLANS)] = "none"
    """Automatic planning. auto: choose degrees, ZeRO stage, --ac and micro-batches by predicted time and memory."""
    hardware: Annotated[str, arg(metavar="auto|NODE|PATH.json")] = "auto"
    """Hardware for --plan auto: detected, a known node type, or a file from `python -m usp calibrate`."""

    model: Annotated[str, arg(metavar="PRESET|PATH", help=MODEL_HELP)] = "tiny"
    data: Annotated[str, arg(metavar="stdlib|PATH|PATH=WEIGHT,PATH=WEIGHT,...")] = "stdlib"
    """Token store (see `python -m usp tokenize`), or text, JSON, JSONL, CSV, Parquet or Arrow file, compressed or not,
    or a directory of them. Several are mixed by weight. stdlib: the source code of Python's standard library."""
    data_field: str = TEXT_FIELD
    """Key or column that holds the text, or a list of messages; not used for text files. Without such a key, messages,
    or prompt and completion, are found by these names."""
    packing: Annotated[str, one_of(PACKINGS)] = "auto"
    """How documents fill sequences. cut: one after another, cut at the end; whole: whole ones by best fit, padded.
    auto: whole for chats and completions, otherwise cut."""
    data_cache: Annotated[str, arg(metavar="PATH")] = "~/.cache/usp"
    """Directory in which tokenized data is kept and found again."""
    data_changed: bool = False
    """Resume although data, tokenizer or --seq-len differ from the checkpoint's, and begin a new epoch."""
    eval_data: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """Held-out data, evaluated during training. What of it is below --data is not trained on."""
    eval_every: int = 0
    """Steps between evaluations on --eval-data; the last step is evaluated too. 0: at every checkpoint."""
    tokenizer: Annotated[str, arg(metavar="auto|bytes|PATH")] = "auto"
    """Local transformers tokenizer directory. bytes: byte-level tokens, as in ByT5. auto: the model directory's own, or
    bytes for a preset."""
    bos: Annotated[str, one_of(BOS)] = "auto"
    """Whether a document begins with the tokenizer's BOS. auto: as the tokenizer does."""
    parse_special_tokens: bool = False
    """Turn special tokens that are written out in the data, such as <|endoftext|>, into their ids instead of text. In
    chats they always are."""
    chat_template: Annotated[str, arg(metavar="FILE", help_behavior_hint="(optional)")] = ""
    """Chat template (Jinja) for messages, instead of the tokenizer's own; exported with the model."""

    seq_len: Annotated[int, TOKENS] = 4096
    """Sequence length in tokens, before sharding over ranks; 128K is 131072, 1M is 1024K."""
    rope_scaling: Annotated[str, one_of(ROPE_SCALINGS)] = "none"
    """Scaling of rotary positions, for a --seq-len beyond a checkpoint's limit. ntk changes the base (NTK-aware)."""
    batch_size: int = 1
    """Sequences per data-parallel rank and step."""
    global_batch_size: int = 0
    """Sequences per step over all ranks, instead of --batch-size. 0: not set."""
    micro_batches: int = 1
    """Micro-batches per step, for gradient accumulation and to fill the pipeline. Divides batch_size."""
    steps: int = 100
    """Optimizer steps."""
    train_tokens: int = 0
    """Tokens to train on, instead of --steps: the last step is a whole one. 0: not set."""
    curriculum: Annotated[tuple[CurriculumStage, ...], STAGES] = ()
    """Stages one after another, instead of --steps: a YAML list of {steps, and what of seq_len, data, sp_ulysses,
    sp_ring, batch_size, global_batch_size, micro_batches and ac a stage changes}."""
    learning_rate: Annotated[
        float, arg(help_behavior_hint="(default: 3e-3 for a preset, 1e-5 for a directory, 1e-4 with LoRA)")
    ] = 0.0
    """Peak learning rate."""
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "adamw"
    """Optimizer. muon: for the matrices of the layers, at the same learning rate; AdamW for the rest."""
    muon_momentum: float = 0.95
    """Momentum of Muon (Nesterov's)."""
    warmup_steps: int = 10
    """Linear warmup steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay, for matrices only."""
    adam_beta1: float = 0.9
    """AdamW beta1."""
    adam_beta2: float = 0.95
    """AdamW beta2."""
    adam_eps: float = 1e-8
    """AdamW epsilon."""
    max_grad_norm: float = 1.0
    """Maximum global gradient norm. inf: no clipping."""
    seed: int = 0
    """Seed for weight initialization and data order."""

    compile: bool = False
    """Compile each layer with torch.compile; attention is one operator of its graph. Experts and recurrent layers stay
    eager."""
    profile: Annotated[str, arg(metavar="STEP|FIRST:LAST", help_behavior_hint="(optional)")] = ""
    """Steps to profile, such as 3 or 5:8. Traces for chrome://tracing or Perfetto go to the output directory."""


@dataclass(frozen=True)
class TrainConfig(RunConfig, MemoryConfig, RouterConfig, ScheduleConfig, _Training, LoraConfig, ParallelConfig):
    """Train a causal language model with Ulysses x Ring sequence parallelism, combined with data, tensor, pipeline and
    expert parallelism.

    For example, on 8 ranks: torchrun --nproc-per-node 8 train.py --sp-ulysses 4 --sp-ring 2

    Outside the repository, use --no-python usp-train instead of train.py.
    """


def config_from_mapping(mapping: Mapping[str, Any], kind: type[C]) -> C:
    """Build a `kind` from `mapping`, with defaults for missing keys; keys may have dashes for underscores.

    Raises:
        ValueError: listing every unknown key with its nearest match, every duplicate, and every value of a wrong type.
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
        elif name == "curriculum":
            try:
                values[name] = stages_from(value)
            except ValueError as error:
                problems.append(str(error))
        else:
            try:
                values[name] = _convert(value, hints[name])
            except (TypeError, ValueError):
                problems.append(f"{key} = {value!r} must be {TYPE_NAMES[hints[name]]}")
    if problems:
        raise ValueError("; ".join(problems))
    return kind(**values)


def by_stage(config: TrainConfig) -> tuple[TrainConfig, ...]:
    """Return the configuration of each stage of the curriculum, with the steps of the whole run; or only `config`."""
    if not config.curriculum:
        return (config,)
    total, found = sum(stage.steps for stage in config.curriculum), []
    for stage in config.curriculum:
        changes = stage.given()
        if changes.keys() & {"sp_ulysses", "sp_ring"}:
            changes["dp_shard"] = -1
        if changes.keys() & {"batch_size", "global_batch_size"}:  # one of them is meant, as in the run's own
            changes = {"batch_size": TrainConfig.batch_size, "global_batch_size": 0} | changes
        found.append(replace(config, curriculum=(), **{"steps": total} | changes))
    return tuple(found)


def flag(name: str) -> str:
    """Return the flag of a field: `sp_ring` is `--sp-ring`."""
    return "--" + name.replace("_", "-")


def _convert(value: Any, kind: type) -> Any:
    """Convert `value` to `kind` if that is lossless. YAML reads 3e-4 as a string, so a string may hold a float."""
    if kind is float and type(value) in (int, float, str):
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value
