"""What a rank computes in a step: FLOPs as kernels are asked for them, and seconds on given hardware.

Matrix products and attention count as in `kernel_flops`: recomputation included, 5 products in attention's backward,
and of attention what its mask shows. All else (norms, activations, rotations, residuals, softmax of the vocabulary, the
optimiser) takes the time of reading and writing its operands; how often it does is stated below, for the operators of
transformers' models one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attention import RingSchedule, Task
from parallel import Hardware
from usp.cost.job import Job, LayerShape, ParameterShape
from usp.cost.traffic.sharding import FLOAT32, Unit, stage_units
from usp.cost.traffic.step_traffic import attention_plan

FORWARD, BACKWARD = 2, 5  # attention's products
# Passes over memory of a forward, in elements of the computation's dtype; a backward makes twice as many.
HIDDEN_PASSES = 2 * 8 + 2 * 3  # two norms in float32, with a cast each way; two residual additions
HEADS_PASSES = 6  # of q and k: a rotation is two products, a copy in halves, and a sum
MLP_PASSES = 5  # of an MLP's hidden layer: the activation, and its product with the other half
LOGIT_PASSES = 10  # float32: largest, difference, exponential, sum, gradient, cast
OPTIMIZER_BYTES = (
    4 + 8 + 3 * 8
)  # of an element: gradient for the norm, clipped; parameter and both states, read, written


@dataclass(frozen=True)
class Seconds:
    """Of one pass over something: by what bounds it."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.matmul + other.matmul, self.attention + other.attention, self.memory + other.memory)

    def times(self, number: float) -> Seconds:
        return Seconds(number * self.matmul, number * self.attention, number * self.memory)


@dataclass(frozen=True)
class Product:
    """A matrix product: its FLOPs, and the bytes that it reads and writes."""

    flops: float
    nbytes: float

    @staticmethod
    def of(rows: float, inner: float, columns: float, itemsize: int) -> Product:
        return Product(2.0 * rows * inner * columns, (rows * inner + inner * columns + rows * columns) * itemsize)

    def seconds(self, hardware: Hardware, dtype: str) -> float:
        """By its kernel or by its operands, whichever takes longer: thin products wait for memory."""
        return max(hardware.matmul_seconds(self.flops, dtype), hardware.memory_seconds(self.nbytes))


def dtype_name(job: Job) -> str:
    return str(job.dtype).removeprefix("torch.")


def is_product(parameter: ParameterShape) -> bool:
    """Whether a layer's parameter multiplies its tokens: all matrices do."""
    return len(parameter.shape) == 2


def _linear(job: Job, parameter: ParameterShape) -> Product:
    columns, inner = parameter.local(job.dims.tp)
    # what tensor-parallel ranks do not divide, they compute on their share of the tokens
    tokens = job.tokens if parameter.tp_dim is not None else job.outer_tokens
    return Product.of(tokens, inner, columns, job.dtype.itemsize)


def _of_experts(job: Job, parameter: ParameterShape, rows: int) -> Product:
    _, columns, inner = parameter.shape
    held = parameter.numel / job.dims.ep + rows * (columns + inner)
    return Product(2.0 * rows * columns * inner, held * job.dtype.itemsize)


def _in_mlp(parameter: ParameterShape) -> bool:
    return ".mlp." in f".{parameter.name}"


def layer_products(job: Job, layer: LayerShape) -> tuple[list[Product], list[Product]]:
    """Each matrix product of one micro-batch's forward, and what the backward computes again.

    A recomputation stops before a layer's last product, whose result nothing needs.
    """
    linears = [p for p in layer.parameters if is_product(p)]
    forward = [_linear(job, p) for p in linears]
    rows = job.outer_tokens * job.model.experts_per_token
    forward += [_of_experts(job, p, rows) for p in layer.experts]
    again = forward[:-1] if job.ac != "none" else []
    if job.mlp_tile and not layer.experts:
        mlp = [_linear(job, p) for p in linears if _in_mlp(p)]
        if job.ac != "none":  # the layer's recomputation stops before its last tile
            before_last = (-(-job.layout.local_len // job.mlp_tile) - 1) * job.mlp_tile / job.layout.local_len
            tiled = [Product(before_last * product.flops, before_last * product.nbytes) for product in mlp]
            again = [_linear(job, p) for p in linears if not _in_mlp(p)] + tiled
        again = again + mlp[:-1]
    return forward, again


def head_products(job: Job) -> list[Product]:
    """The loss's products with the vocabulary: logits and both gradients, all made in the forward."""
    weights = job.model.head or job.model.embedding
    vocabulary = [(p.shape[0] / job.dims.tp, p.shape[1]) for p in weights if is_product(p)]
    return [Product.of(job.tokens, inner, rows, job.dtype.itemsize) for rows, inner in vocabulary for _ in range(3)]


def attention_work(job: Job, ring: RingSchedule, heads: int, products: int) -> list[list[tuple[float, Task]]]:
    """For each ring step, its tasks with their FLOPs."""
    per_pair = 2.0 * products * heads * job.model.facts.head_dim
    return [[(per_pair * task.visible(), task) for task in step.tasks] for step in ring.steps]


def step_flops(job: Job, rank: int) -> float:
    """Matrix products and attention of one step on a rank."""
    total, windows = 0.0, job.model.facts.windows
    attention = {window: _attention_flops(job, rank, window) for window in dict.fromkeys(windows)}
    for stage in job.stages(rank):
        for index in job.stage_layers[stage]:
            forward, again = layer_products(job, job.model.layers[index])
            total += 3 * _flops(forward) + _flops(again) + attention[windows[index]]
        if stage == len(job.stage_layers) - 1:
            total += _flops(head_products(job))
    return total * job.micro_batches


def _flops(products: list[Product]) -> float:
    return sum(product.flops for product in products)


def _attention_flops(job: Job, rank: int, window: int) -> float:
    plan = attention_plan(job, rank, window)
    products = FORWARD * (2 if job.ac == "full" else 1) + BACKWARD
    work = attention_work(job, plan.ring, plan.heads.q_width(plan.ulysses_rank), products)
    return sum(flops for step in work for flops, _ in step)


def layer_seconds(job: Job, hardware: Hardware, layer: LayerShape) -> tuple[Seconds, Seconds]:
    """(forward, backward) of a decoder layer for one micro-batch, without attention's kernels."""
    name = dtype_name(job)
    forward, again = layer_products(job, layer)
    memory = hardware.memory_seconds(sum(_layer_bytes(job, layer)))
    matmul = sum(product.seconds(hardware, name) for product in forward)
    repeated = sum(product.seconds(hardware, name) for product in again)
    recomputed = memory if job.ac != "none" else 0.0
    return Seconds(matmul, 0.0, memory), Seconds(2 * matmul + repeated, 0.0, 2 * memory + recomputed)


def _layer_bytes(job: Job, layer: LayerShape) -> Iterator[float]:
    """What a forward reads and writes outside of products and attention."""
    facts, itemsize = job.model.facts, job.dtype.itemsize
    yield HIDDEN_PASSES * job.outer_tokens * job.model.hidden_size * itemsize
    yield HEADS_PASSES * job.tokens * (facts.num_heads + facts.num_kv_heads) * facts.head_dim / job.dims.tp * itemsize
    if layer.experts:
        rows = job.outer_tokens * job.model.experts_per_token
        yield MLP_PASSES * rows * job.model.expert_size * itemsize
        yield 4 * rows * job.model.hidden_size * itemsize  # gathered by expert, and added back
    else:
        yield MLP_PASSES * job.tokens * facts.intermediate_size / job.dims.tp * itemsize


def head_seconds(job: Job, hardware: Hardware) -> Seconds:
    """The loss of one micro-batch, gradients included."""
    matmul = sum(product.seconds(hardware, dtype_name(job)) for product in head_products(job))
    logits = job.tokens * job.model.facts.vocab_size / job.dims.tp * FLOAT32
    return Seconds(matmul, 0.0, hardware.memory_seconds(LOGIT_PASSES * logits))


def ring_step_seconds(job: Job, hardware: Hardware, ring: RingSchedule, heads: int, *, backward: bool) -> list[float]:
    """Attention's compute of each ring step, one micro-batch and layer; with more than one, its sums' memory too."""
    products = BACKWARD if backward else FORWARD
    sums = 0.0
    if len(ring.steps) > 1:  # a float32 sum is read and written, and the part that is added read
        queries = job.layout.ring_len * (job.rows // job.micro_batches)
        sums = hardware.memory_seconds(queries * heads * job.model.facts.head_dim * (2 * FLOAT32 + job.dtype.itemsize))

    def seconds(flops: float, task: Task) -> float:
        side = min(task.rows, task.columns)
        return hardware.attention_seconds(flops, side, dtype_name(job), backward=backward, full=task.full)

    return [
        sum(seconds(*one) for one in tasks) + (sums if tasks else 0.0)
        for tasks in attention_work(job, ring, heads, products)
    ]


def held_elements(job: Job, rank: int) -> int:
    """Parameters that this rank keeps and updates."""

    def own(unit: Unit | None) -> int:
        return 0 if unit is None else unit.shard if unit.ranks > 1 else unit.numel

    units = [stage_units(job, stage) for stage in job.stages(rank)]
    return sum(own(unit) for stage in units for unit in (stage.root, *stage.layers, *stage.experts))


def optimizer_seconds(job: Job, hardware: Hardware, rank: int) -> float:
    """Gradient norm, clipping and AdamW, over what this rank keeps."""
    return hardware.memory_seconds(OPTIMIZER_BYTES * held_elements(job, rank))


def sequence_borders(job: Job) -> torch.Tensor:
    """The rows of the whole global batch, one document each, as `usp.model.facts.visible_pairs` takes them."""
    return torch.tensor([[0, job.seq_len]] * (job.rows * job.dims.batch))
