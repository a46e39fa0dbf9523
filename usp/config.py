"""Training configuration: one flat frozen dataclass.

`TrainConfig` lists every option of train.py; rlhf.py (`usp.rlhf.config`) shares all but `_Training`. Each field
is a flag (`sp_ring` is `--sp-ring`, the string below it is its help) and a key of a YAML or TOML file. Nothing here
depends on the machine. The annotation of a field holds the rule on its values; the rules on several fields are in
`usp.train.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from tyro.conf import arg

from usp.attention import KERNEL_NAMES, LAYOUTS, SequenceLayout
from usp.data.documents import DROP, REFUSE
from usp.fields import (
    AUTO_RATE,
    RATE,
    TOKENS,
    AtLeast0,
    AtLeast1,
    Fraction,
    NotNegative,
    OnlyWith,
    Rule,
    among,
    at_least,
    config_from_mapping,
    one_of,
    shown,
    without_effect,
)
from usp.optimizers import OPTIMIZERS
from usp.parallel import PP_SCHEDULES, SP_ORDERS, ZERO_STAGES, PipelineSchedule
from usp.presets import PRESETS

AC_MODES = ("none", "selective", "attention-saved", "full")
PLANS = ("none", "auto", "tune")
CHOSEN = (  # what a plan sets, the options that save memory last
    *("sp_ulysses", "sp_ring", "dp_shard", "dp_replicate", "tp", "tp_sequence_parallel", "pp", "pp_schedule", "ep"),
    *("pp_stages_per_rank", "batch_size", "micro_batches", "zero", "ac", "ac_offload", "mlp_tile", "optim_offload"),
)
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
BOS = ("auto", "always", "never")
PACKINGS = ("auto", "cut", "whole")
BAD_ROWS = (REFUSE, DROP)
FP8 = ("none", "tensor", "row", "mx")
ROUTER_BALANCES = ("step", "micro-batch")
ALL_LINEAR = "all-linear"  # LoRA targets
LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")
ROPE_SCALINGS = ("none", "yarn", "linear", "ntk")
# Options that change neither the bytes nor the memory nor the seconds of a step. Commands that predict a step accept
# them in a configuration file, and have no flags for them (`usp.commands.flags.parse`).
UNPREDICTED = frozenset({
    "output", "log_every", "checkpoint_every", "keep_checkpoints", "resume", "hang_timeout", "wandb_project",
    "trackio_project", "mlflow_experiment",
    "export_dtype", "profile", "plan", "tune_budget", "hardware", "data", "data_field", "packing",
    "bad_rows", "train_on", "data_cache", "data_changed", "tokenizer", "bos", "parse_special_tokens", "chat_template",
    "eval_data", "eval_every", "steps", "train_tokens", "seed", "learning_rate", "lr_schedule", "lr_final",
    "lr_decay_steps", "warmup_steps", "weight_decay", "max_grad_norm", "lora_alpha", "lora_merge",
    "early_stopping_patience", "add_tokens", "balance_rows", "sample_prompts", "sample_every", "sample_tokens",
    "sample_temperature", "router_bias_update_rate",
    *(option for optimizer in OPTIMIZERS.values() for option in optimizer.options),
})  # fmt: skip
MAX_TIMEOUT = 86400.0  # a day: process groups wait a few times longer, which torch counts in int32 milliseconds

_OPTIONS = [set(each.options) for each in OPTIMIZERS.values()]
OPTIMIZER_HELP = " ".join(["Optimizer.", *(f"{name}: {each.help}." for name, each in OPTIMIZERS.items() if each.help)])
MODEL_HELP = f"Preset with random weights ({', '.join(PRESETS)}), or a local transformers checkpoint directory."

# Aliases, because a lambda in an annotation that is a string does not see the names of this module.
Positive = Annotated[float, Rule(lambda value: 0 < value < math.inf, "positive and finite")]
Share = Annotated[float, Rule(lambda value: 0 <= value <= 1, "from 0 to 1")]
Remaining = Annotated[int, Rule(lambda value: value == -1 or value >= 1, "at least 1, or -1 for the remaining ranks")]
Timeout = Annotated[
    float, Rule(lambda value: 0 <= value <= MAX_TIMEOUT, f"0 to {MAX_TIMEOUT:.0f} seconds; 0 disables it")
]
AuxLoss = Annotated[
    float, Rule(lambda value: value == -1 or 0 <= value < math.inf, "at least 0, or -1 for the model's own value")
]
Norm = Annotated[float, Rule(lambda value: value > 0, "positive; inf disables clipping")]


def _only_with(option: str) -> OnlyWith:
    names = [name for name, each in OPTIMIZERS.items() if option in each.options]
    why = f"is an option of --optimizer {' or '.join(names)}: remove it"
    return OnlyWith((option,), lambda c: c.optimizer in names, why)


# Options that have an effect only beside another one: those that rlhf.py has, too, and others of train.py.
ONLY_WITH = (
    OnlyWith(
        ("lora_alpha", "lora_targets", "lora_merge", "lora_modules_to_save"),
        lambda c: c.lora_rank,
        "is an option of LoRA adapters, but --lora-rank is 0: set --lora-rank, or remove it",
    ),
    OnlyWith(
        ("ac_offload",),
        lambda c: c.ac != "none" or c.plan in PLANS[1:] or getattr(c, "curriculum", ()),
        "offloads what activation checkpointing saves, but --ac is none: use --ac full",
    ),
    OnlyWith(
        ("lr_final",), lambda c: c.lr_schedule != "constant", "ends a decay, and --lr-schedule is constant: remove it"
    ),
    OnlyWith(("lr_decay_steps",), lambda c: c.lr_schedule == "wsd", "is an option of --lr-schedule wsd: remove it"),
)
_OF_TRAINING = (
    OnlyWith(
        ("tp_sequence_parallel",),
        lambda c: c.tp > 1 or c.plan in PLANS[1:],
        "shards tokens over tensor-parallel ranks, but --tp is 1: set --tp, or remove it",
    ),
    OnlyWith(
        ("pp_schedule", "pp_stages_per_rank"),
        lambda c: c.pp > 1 or c.plan in PLANS[1:],
        "schedules a pipeline, but --pp is 1: set --pp, or remove it",
    ),
    OnlyWith(
        ("async_tp",),
        lambda c: c.compile and (c.tp_sequence_parallel or c.plan in PLANS[1:]),
        "hides messages of --tp-sequence-parallel in layers of --compile: give both, or remove it",
    ),
    OnlyWith(
        ("ep_chunks",), lambda c: c.ep > 1 or c.plan in PLANS[1:], "divides messages of --ep, which is 1: remove it"
    ),
    OnlyWith(("tune_budget",), lambda c: c.plan in PLANS[1:], "limits what --plan tune costs: give both or neither"),
    OnlyWith(("hardware",), lambda c: c.plan in PLANS[1:], "is only used by --plan: give both or neither"),
    OnlyWith(
        ("eval_every", "early_stopping_patience"),
        lambda c: c.eval_data,
        "needs data to evaluate on: give --eval-data, or remove it",
    ),
    OnlyWith(
        ("sample_prompts", "sample_tokens", "sample_temperature"),
        lambda c: c.sample_every,
        "is an option of --sample-every: give that, or remove it",
    ),
    *map(_only_with, sorted(_OPTIONS[0].union(*_OPTIONS) - _OPTIONS[0].intersection(*_OPTIONS))),
    OnlyWith(("fp8_emulate",), lambda c: c.fp8 != "none", "is an option of --fp8, which is none: remove it"),
    OnlyWith(
        ("indexer_warmup",), lambda c: c.indexer_loss_coef, "trains by the loss of --indexer-loss-coef: give that"
    ),
    OnlyWith(("data_changed",), lambda c: c.resume, "continues a run with other data: give --resume, or remove it"),
)
# Keys of files of earlier versions, with the value that says what is always done now.
REMOVED = {"engine": "fsdp2", "lora_dora": False, "lora_dropout": 0.0}
# Of two options that set the same, one may be given; one on the command line replaces the other of a file.
EITHER = (("steps", "train_tokens"), ("batch_size", "global_batch_size"))


def without_removed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file without those of earlier versions. Raises ValueError for one that asked for what is
    not done any more."""
    for key, done in REMOVED.items():
        if mapping.get(key, done) != done:
            raise ValueError(f"{key} = {mapping[key]!r} is gone, and only {done!r} is supported: remove the key")
    return {key: value for key, value in mapping.items() if key not in REMOVED}


@dataclass(frozen=True)
class CurriculumStage:
    """A stage of a curriculum: its steps, and the fields of TrainConfig that it changes; 0 and "" change nothing.

    With `sp_ulysses` or `sp_ring`, dp_shard takes the remaining ranks. In YAML:

    - {steps: 1000, seq_len: 8K, data: "web=0.8,books=0.2", sp_ulysses: 2, global_batch_size: 64}
    - {steps: 200, seq_len: 128K, data: "books=0.9,code=0.1", sp_ulysses: 8, sp_ring: 2, global_batch_size: 4}
    """

    steps: int
    seq_len: Annotated[int, TOKENS] = 0
    data: str = ""
    sp_ulysses: int = 0
    sp_ring: int = 0
    batch_size: int = 0
    global_batch_size: int = 0
    micro_batches: int = 0
    ac: str = ""


def stages_from(listed: Any) -> tuple[CurriculumStage, ...]:
    """Read the stages of a curriculum from a list of mappings; keys may have dashes for underscores. Raises ValueError,
    naming the stage and the key that is wrong."""
    if not isinstance(listed, list | tuple):
        raise ValueError(f"a curriculum is a list of stages, such as [{{steps: 100, seq_len: 8K}}], not {listed!r}")
    return tuple(_stage(number, values) for number, values in enumerate(listed, start=1))


def read_stages(path: str) -> tuple[CurriculumStage, ...]:
    """Read a curriculum from a YAML file: a list of stages, or a mapping with the key `curriculum`. Raises ValueError
    for a file that cannot be read, and as `stages_from`."""
    if not path:
        return ()
    try:
        listed = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not a curriculum: {error}") from error
    if isinstance(listed, Mapping) and listed.keys() == {"curriculum"}:
        listed = listed["curriculum"]
    return stages_from(listed)


def _stage(number: int, values: Any) -> CurriculumStage:
    if isinstance(values, CurriculumStage):
        return values
    try:
        stage = config_from_mapping({"steps": 0, **(values if isinstance(values, Mapping) else {})}, CurriculumStage)
    except ValueError as error:
        keys = ", ".join(field.name for field in fields(CurriculumStage))
        raise ValueError(f"stage {number} of the curriculum: {error}; its keys are {keys}") from error
    if stage.steps < 1:
        raise ValueError(f"stage {number} of the curriculum needs its number of steps, such as {{steps: 100}}")
    return stage


STAGES = shown(
    "PATH.yaml", tuple, read_stages, lambda stages: f"{len(stages)} stages" if stages else "", read=stages_from
)


@dataclass(frozen=True)
class SequenceFlags:
    """How a sequence is divided over ranks."""

    sp_ulysses: AtLeast1 = 1
    """Ulysses degree: sequence parallelism by all-to-all over attention heads. Best kept within a host."""
    sp_ring: AtLeast1 = 1
    """Ring degree: sequence parallelism by passing keys and values around a ring. May span hosts."""
    sp_layout: Annotated[str, one_of(LAYOUTS)] = "zigzag"
    """Assignment of sequence positions to ranks. zigzag and striped balance the causal mask of one document, balanced
    that of packed ones; auto takes balanced for rows that zigzag divides unevenly."""


@dataclass(frozen=True)
class ComputeFlags:
    """What a model computes with."""

    attention_kernel: Annotated[str, one_of(KERNEL_NAMES)] = "auto"
    """Attention kernel. auto: the fastest supported one, by its rates on this GPU. flash: the fastest flash-attn."""
    dtype: Annotated[str, one_of(DTYPES)] = "auto"
    """Compute dtype; weights and optimizer states stay float32. auto: bfloat16 on CUDA, float32 on CPU."""
    device: Annotated[str, one_of(DEVICES)] = "auto"
    """Device type. auto: CUDA if available, otherwise CPU."""


@dataclass(frozen=True)
class DocumentFlags:
    """How documents become tokens, in training and in token stores."""

    data_field: Annotated[str, arg(metavar="KEY|KEY,KEY", help_behavior_hint="(optional)")] = ""
    """Key or column of the text or the messages, or of prompts and completions; not used for text files. By default
    messages, else text, else prompt and completion, instruction and output, and so on."""
    bad_rows: Annotated[str, one_of(BAD_ROWS)] = "refuse"
    """Rows of the data that cannot be read or rendered. refuse: an error. drop: left out, and counted."""
    train_on: Annotated[str, arg(metavar="last|ROLE,ROLE,...")] = "assistant"
    """Roles in chats whose messages are trained on. last: only the last message of the assistant."""
    bos: Annotated[str, one_of(BOS)] = "auto"
    """Whether a document begins with the tokenizer's BOS. auto: as the tokenizer does."""
    parse_special_tokens: bool = False
    """Encode special tokens that are written out in the data, such as <|endoftext|>, as their ids instead of as text.
    In chats they always are."""
    add_tokens: Annotated[str, arg(metavar="TOKEN,TOKEN,...|FILE", help_behavior_hint="(optional)")] = ""
    """Special tokens to add to the tokenizer, or a text file of them, one a line. If the model's vocabulary lacks rows
    for them, it grows to a multiple of 64; new rows begin with the mean of the others."""


@dataclass(frozen=True)
class ParallelConfig(SequenceFlags):
    """Parallel degrees and sharding, shared by train.py and rlhf.py."""

    sp_order: Annotated[str, one_of(SP_ORDERS)] = "ring-outer"
    """Nesting of the two degrees. ring-outer: the ranks of a Ulysses group are neighbors."""
    dp_shard: Remaining = -1
    """Sharded data-parallel degree (FSDP). -1: all remaining ranks."""
    dp_replicate: AtLeast1 = 1
    """Replicated data-parallel degree: number of copies of the sharded parameters (HSDP)."""
    tp: AtLeast1 = 1
    """Tensor-parallel degree. Best kept within a host; splits the attention heads before Ulysses does."""
    tp_sequence_parallel: bool = False
    """Also shard activations over the sequence between tensor-parallel layers (Megatron sequence parallelism)."""
    pp: AtLeast1 = 1
    """Pipeline-parallel degree."""
    ep: AtLeast1 = 1
    """Expert-parallel degree; divides dp_shard x ring x ulysses x tp."""
    zero: Annotated[int, among(ZERO_STAGES)] = 3
    """ZeRO stage, over dp x sp: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""


@dataclass(frozen=True)
class ModelFlags:
    """The model and its tokenizer, shared by train.py and rlhf.py."""

    model: Annotated[str, arg(metavar="PRESET|PATH", help=f"Model to train. {MODEL_HELP}")] = "tiny"
    tokenizer: Annotated[str, arg(metavar="auto|bytes|PATH")] = "auto"
    """Local transformers tokenizer directory. bytes: byte-level tokens, as in ByT5. auto: the model directory's own, or
    bytes for a preset."""
    chat_template: Annotated[str, arg(metavar="FILE", help_behavior_hint="(optional)")] = ""
    """Chat template (Jinja) for messages, instead of the tokenizer's own; exported with the model."""


@dataclass(frozen=True)
class CommonConfig(ComputeFlags, ParallelConfig, ModelFlags):
    """The options that train.py and rlhf.py share."""

    disable_dropout: bool = False
    """Set the model's dropout to 0, in training and in its exported configuration. With dropout, it is refused."""

    lora_rank: AtLeast0 = 0
    """Rank of the LoRA adapters that are trained instead of the model's weights (requires peft). 0: no adapters."""
    lora_alpha: AtLeast0 = 0
    """Scale of the adapters: their output is multiplied by alpha / rank. 0: twice the rank."""
    lora_targets: Annotated[str, arg(metavar="all-linear|NAME,NAME,...")] = ALL_LINEAR
    """Linear layers that get adapters, such as q_proj,v_proj. all-linear: all except experts and what peft refuses."""
    lora_merge: bool = False
    """Also export the model with the adapters merged into its weights."""

    steps: AtLeast1 = 100
    """Optimizer steps."""
    lr_schedule: Annotated[str, one_of(LR_SCHEDULES)] = "cosine"
    """Learning rate after the warmup. wsd: constant, then a linear decay in the last --lr-decay-steps."""
    lr_final: Share = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    lr_decay_steps: Annotated[int, at_least(-1, "at least 0, or -1 for a tenth of --steps")] = -1
    """Steps of the decay of --lr-schedule wsd. -1: a tenth of all steps."""

    router_aux_loss_coef: AuxLoss = -1.0
    """MoE load-balancing loss coefficient. -1: router_aux_loss_coef of the model configuration."""
    router_balance: Annotated[str, one_of(ROUTER_BALANCES)] = "step"
    """Tokens that the load-balancing loss covers. step: exact over the step; needs an extra counting forward pass with
    micro-batches. micro-batch: the mean over micro-batches."""

    ac: Annotated[str, one_of(AC_MODES)] = "none"
    """Activation checkpointing. full: recompute each layer; attention-saved: all but attention; selective: neither
    attention nor matrix products."""
    ac_offload: bool = False
    """Offload checkpointed activations to host memory."""
    loss_chunk: AtLeast1 = 2048
    """Tokens per rank whose logits are materialized at a time."""
    mlp_tile: AtLeast0 = 0
    """Tokens per MLP tile, recomputed in the backward. 0: no tiling."""

    export_dtype: Annotated[str, one_of(DTYPES)] = "auto"
    """Data type of the exported model. auto: the compute dtype, or float32 for adapters. Checkpoints hold float32."""

    output: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: runs/<time>-<model>)")] = ""
    """Output directory for the configuration, metrics, TensorBoard logs, checkpoints and final model."""
    log_every: AtLeast1 = 10
    """Steps between log lines. metrics.jsonl records every step."""
    checkpoint_every: AtLeast0 = 100
    """Steps between checkpoints; the last step is saved too. 0: save only when a signal stops the run."""
    keep_checkpoints: AtLeast1 = 2
    """Number of checkpoints to keep; older ones are deleted."""
    resume: Annotated[str, arg(metavar="auto|PATH", help_behavior_hint="(optional)")] = ""
    """Run directory or checkpoint to resume from; layout and world size may change. auto: the run in --output."""
    hang_timeout: Timeout = 600.0
    """Seconds without progress before the run is aborted with a report of where each rank hangs. 0: no limit."""
    wandb_project: Annotated[str, arg(metavar="NAME", help_behavior_hint="(optional)")] = ""
    """Also log to this Weights & Biases project (requires wandb)."""
    trackio_project: Annotated[str, arg(metavar="NAME", help_behavior_hint="(optional)")] = ""
    """Also log to this Trackio project (requires trackio)."""
    mlflow_experiment: Annotated[str, arg(metavar="NAME", help_behavior_hint="(optional)")] = ""
    """Also log to this MLflow experiment (requires mlflow or mlflow-skinny)."""


@dataclass(frozen=True)
class _Training:
    """Options of train.py only."""

    data: Annotated[str, arg(metavar="stdlib|PATH|PATH=WEIGHT,PATH=WEIGHT,...")] = "stdlib"
    """Token store (see `python -m usp tokenize`), or text, JSON, JSONL, CSV, Parquet or Arrow file, compressed or not,
    or a directory of them. Several are mixed by weight. stdlib: the source code of Python's standard library."""
    packing: Annotated[str, one_of(PACKINGS)] = "auto"
    """How documents fill sequences. cut: one after another, cut at the end of a sequence. whole: uncut, by best fit,
    padded. auto: whole for chats and completions, otherwise cut."""
    data_cache: Annotated[str, arg(metavar="PATH")] = "~/.cache/usp"
    """Directory in which tokenized data is stored for later runs."""
    data_changed: bool = False
    """Resume although data, tokenizer or --seq-len differ from the checkpoint's, and begin a new epoch."""
    eval_data: Annotated[str, arg(metavar="PATH|NAME=PATH,NAME=PATH,...", help_behavior_hint="(optional)")] = ""
    """Held-out data, evaluated during training, packed as --packing says. The first of several sets chooses RUN/best.
    Files that are also under --data are excluded from training."""
    eval_every: AtLeast0 = 0
    """Steps between evaluations on --eval-data; the last step is evaluated too. 0: at every checkpoint."""
    early_stopping_patience: AtLeast0 = 0
    """Evaluations on --eval-data without a new lowest loss after which the run ends. 0: all steps."""
    freeze_encoder: bool = False
    """Do not train the encoder of images and its projector; with adapters they never are."""
    sample_prompts: Annotated[str, arg(metavar="FILE", help_behavior_hint="(optional)")] = ""
    """Prompts to which the model responds during training, in RUN/samples.jsonl: lines of text, or JSONL with prompt or
    messages."""
    sample_every: AtLeast0 = 0
    """Steps between responses to --sample-prompts; the last step has some too. 0: none."""
    sample_tokens: AtLeast1 = 256
    """Maximum tokens of such a response."""
    sample_temperature: NotNegative = 0.0
    """Temperature of such responses. 0: greedy."""
    seq_len: Annotated[int, TOKENS, at_least(2, "at least 2: a token and the next one")] = 4096
    """Sequence length in tokens, before sharding over ranks; 128K is 131072, 1M is 1024K."""
    rope_scaling: Annotated[str, one_of(ROPE_SCALINGS)] = "none"
    """Scaling of rotary positions, for a --seq-len beyond a checkpoint's limit. ntk changes the base (NTK-aware)."""
    batch_size: AtLeast1 = 1
    """Sequences per data-parallel rank and step."""
    global_batch_size: AtLeast0 = 0
    """Sequences per step over all ranks, instead of --batch-size. 0: not set."""
    micro_batches: AtLeast1 = 1
    """Micro-batches per step, for gradient accumulation and to fill the pipeline. Must divide --batch-size."""
    balance_rows: bool = False
    """Deal the sequences of a step to data-parallel ranks for equal attention work, by the lengths of documents."""
    train_tokens: AtLeast0 = 0
    """Tokens to train on, instead of --steps; rounded up to whole steps. 0: not set."""
    curriculum: Annotated[tuple[CurriculumStage, ...], STAGES] = ()
    """YAML list of stages, instead of --steps: steps plus any of seq_len, data, sp_ulysses, sp_ring, batch_size,
    global_batch_size, micro_batches and ac."""
    router_bias_update_rate: NotNegative = 0.0
    """Step of the bias by which routers like DeepSeek-V3's choose experts, after every optimizer step: up for experts
    that fewer tokens chose than the mean, down for others. DeepSeek-V3: 1e-3. 0: it stays as it is."""
    indexer_loss_coef: NotNegative = 0.0
    """Coefficient of the loss of sparse attention's indexers, which have no other gradient. 0: their weights stay."""
    indexer_warmup: bool = False
    """Dense warm-up: attend to all keys, and train only the indexers, to score keys by the attention weights."""
    learning_rate: Annotated[float, RATE] = AUTO_RATE
    """Peak learning rate. auto: 3e-3 for a preset, 1e-5 for a directory, 1e-4 with LoRA."""
    optimizer: Annotated[str, one_of(tuple(OPTIMIZERS)), arg(help=OPTIMIZER_HELP)] = "adamw"
    muon_momentum: Fraction = 0.95
    """Nesterov momentum of Muon."""
    warmup_steps: AtLeast0 = 10
    """Linear warmup steps."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, for matrices only."""
    adam_beta1: Fraction = 0.9
    """AdamW beta1."""
    adam_beta2: Fraction = 0.95
    """AdamW beta2."""
    adam_eps: Positive = 1e-8
    """AdamW epsilon."""
    max_grad_norm: Norm = 1.0
    """Maximum global gradient norm. inf: no clipping."""
    seed: AtLeast0 = 0
    """Seed for weight initialization and data order."""

    plan: Annotated[str, one_of(PLANS)] = "none"
    """Automatic planning. auto: choose degrees, ZeRO stage, --ac and micro-batches by predicted time and memory. tune:
    the fastest of these by the first steps, which the best of several kinds run in turn; also auto on several hosts."""
    tune_budget: Fraction = 0.02
    """Most that --plan tune may cost, as a fraction of the run's time."""
    hardware: Annotated[str, arg(metavar="auto|NODE|PATH.json")] = "auto"
    """Hardware for --plan auto: detected, a known node type, or a file from `python -m usp calibrate`."""
    lora_modules_to_save: Annotated[str, arg(metavar="NAME,NAME,...", help_behavior_hint="(optional)")] = ""
    """Modules to train in full beside the adapters, and to write with them, such as embed_tokens,lm_head."""
    pp_schedule: Annotated[str, one_of(PP_SCHEDULES)] = "1f1b"
    """Pipeline schedule. interleaved-1f1b and zero-bubble (torch 2.13) run two stages a rank, with smaller bubbles."""
    pp_stages_per_rank: AtLeast0 = 0
    """Stages on each rank, which interleaved-1f1b may have more of. 0: 1 for 1f1b, 2 for the other schedules."""
    ep_chunks: AtLeast0 = 0
    """Equal chunks of the experts of an --ep rank, whose messages overlap with the computation of other chunks. Results
    are the same. 0: the largest number up to 4 that divides them."""
    optim_offload: bool = False
    """Keep optimizer states, float32 weights and gradients in host memory, and update the weights there."""
    compile: bool = False
    """Compile layers, and the loss unless --tp, with torch.compile. Attention is one operator; experts and recurrent
    layers stay eager. train.py's default on a GPU, where nothing else that is given is against it."""
    async_tp: bool = False
    """Send messages of --tp-sequence-parallel in parts, during the products of compiled layers (torch's asynchronous
    tensor parallelism). Needs NVIDIA GPUs that reach each other's memory. It has not run on a GPU yet."""
    fp8: Annotated[str, one_of(FP8)] = "none"
    """Multiply in float8 in the layers' linears (requires torchao). tensor: one scale for a tensor, and ZeRO gathers
    float8 weights; row: one for each row; mx: one for each 32 numbers, in experts too. The rest stays in --dtype."""
    fp8_emulate: bool = False
    """Multiply in float32 what --fp8 casts, on a GPU without float8; a CPU always does."""
    profile: Annotated[str, arg(metavar="STEP|FIRST:LAST", help_behavior_hint="(optional)")] = ""
    """Steps to profile, such as 3 or 5:8. Traces for chrome://tracing or Perfetto go to the output directory."""


@dataclass(frozen=True)
class TrainConfig(CommonConfig, DocumentFlags, _Training):
    """Train a causal language model with Ulysses x Ring sequence parallelism, combined with data, tensor, pipeline and
    expert parallelism.

    For example, on 8 ranks: torchrun --nproc-per-node 8 train.py --sp-ulysses 4 --sp-ring 2

    Outside the repository, use --no-python usp-train instead of train.py.
    """

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect beside the others, whatever their values, with messages."""
        return without_effect(self, (*ONLY_WITH, *_OF_TRAINING))

    @property
    def padded_len(self) -> int:
        """Tokens of a sequence with those behind its end that the sequence-parallel ranks need to divide it."""
        return SequenceLayout.padded_len(self.sp_layout, self.seq_len, self.sp_ring, self.sp_ulysses)

    @property
    def pipeline(self) -> PipelineSchedule:
        """The schedule of the pipeline with its stages. Raises ValueError if the two contradict each other."""
        return PipelineSchedule(self.pp_schedule, self.pp_stages_per_rank)

    @property
    def emulates_float8(self) -> bool:
        """Whether what `fp8` casts is multiplied in float32, on a device that is known."""
        return self.fp8 != "none" and (self.fp8_emulate or self.device == "cpu")


def by_stage(config: TrainConfig) -> tuple[TrainConfig, ...]:
    """Return the configuration of each stage of the curriculum, with the steps of the whole run; or only `config`."""
    stages = []
    for stage in config.curriculum:
        changes = {name: value for name, value in vars(stage).items() if value}
        if changes.keys() & {"sp_ulysses", "sp_ring"}:
            changes["dp_shard"] = -1
        if changes.keys() & {"batch_size", "global_batch_size"}:  # the stage gives one of them, and resets the other
            changes = {"batch_size": TrainConfig.batch_size, "global_batch_size": 0} | changes
        changes["steps"] = sum(each.steps for each in config.curriculum)
        stages.append(replace(config, curriculum=(), **changes))
    return tuple(stages) or (config,)
