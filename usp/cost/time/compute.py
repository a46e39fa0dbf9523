"""The compute of a rank in a step: FLOPs as kernels execute them, and seconds on given hardware.

Matrix products and attention count as in `kernel_flops`: with recomputation, 5 products in attention's backward, and
only the visible part of a mask. Everything else (norms, activations, rotary embeddings, residuals, the vocabulary's
softmax, the optimizer) is memory-bound; the constants below count its reads and writes, operator by operator as in
transformers' models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from attention import AttentionSpec, RingSchedule, Task
from parallel import Hardware
from usp.cost.job import Job, LayerShape, ParameterShape
from usp.cost.traffic.sharding import FLOAT32, stage_units
from usp.sp.kernel_choice import kernel_on

from .kernel_flops import BACKWARD, FORWARD

# Elements read and written by a forward outside of matrix products, as transformers' eager layers are written; a
# backward moves twice as many. Counted from their code, not measured. `_norm_bytes` and `_logit_bytes` compute in fp32.
RESIDUAL_PASSES = 3  # two addends and a sum
ROTARY_PASSES = 10  # over q and k: products with cos and sin (4), a negated half (1), halves joined (2), a sum (3)
MLP_PASSES = 5  # over an MLP's hidden layer: the activation, and its product with the other half
# In fp32, per logit: maximum (1), difference and exponential (4), sum (1), gradient (4).
LOGIT_PASSES = 10
LOGPROB_PASSES = 6, 7  # of forward and backward: the same up to the sum; difference, exponential, gradient
# Bytes per element: gradient read for the norm; read and written by clipping; parameter and both states likewise.
OPTIMIZER_BYTES = 4 + 8 + 3 * 8


@dataclass(frozen=True)
class Seconds:
    """The time of compute, by what bounds it; `launch` is the waiting for a host that launches kernels too slowly."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory + self.launch

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory + other.memory,
            self.launch + other.launch,
        )

    def times(self, number: float) -> Seconds:
        return Seconds(number * self.matmul, number * self.attention, number * self.memory, number * self.launch)


@dataclass(frozen=True)
class Product:
    """A matrix product: FLOPs, elements read and written, and bytes of one."""

    flops: float
    elements: float
    itemsize: int

    @staticmethod
    def of(rows: float, inner: float, columns: float, itemsize: int) -> Product:
        return Product(2.0 * rows * inner * columns, rows * inner + inner * columns + rows * columns, itemsize)

    def seconds(self, hardware: Hardware, dtype: str) -> float:
        """Return the time of the kernel or of reading and writing its operands, whichever is longer.

        The kernel runs at the rate of a square product: with as many FLOPs on a GPU, which a large product fills in any
        shape; on a processor with as many FLOPs per element, because caches must serve narrow products more often.
        """
        if not self.flops:
            return 0.0
        side = 1.5 * self.flops / self.elements  # of squares: 2 side^3 FLOPs of 3 side^2 elements
        square = self.flops if hardware.streams else 2 * side**3
        kernel = hardware.matmul_seconds(square, dtype, self.flops / square)
        return max(kernel, hardware.memory_seconds(self.elements * self.itemsize))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_matrix(parameter: ParameterShape) -> bool:
    """Check whether a parameter outside of experts is a matrix, which multiplies every token."""
    return len(parameter.shape) == 2


def _linear(job: Job, parameter: ParameterShape) -> Product:
    columns, inner = parameter.local(job.dims.tp)
    # A matrix that tp does not shard multiplies only this rank's share of the tokens.
    tokens = job.tokens if parameter.tp_dim is not None else job.outer_tokens
    return Product.of(tokens, inner, columns, job.dtype.itemsize)


def _of_experts(job: Job, parameter: ParameterShape, rows: int) -> Product:
    _, columns, inner = parameter.shape
    elements = parameter.numel / job.dims.ep + rows * (columns + inner)
    return Product(2.0 * rows * columns * inner, elements, job.dtype.itemsize)


def _in_mlp(parameter: ParameterShape) -> bool:
    return ".mlp." in f".{parameter.name}"


def layer_products(job: Job, layer: LayerShape) -> tuple[list[Product], list[Product]]:
    """Return (products of one micro-batch's forward, products that its backward recomputes).

    Recomputation skips a layer's last product, because nothing needs its result; `selective` repeats none.
    """
    linears = [p for p in layer.parameters if is_matrix(p)]
    forward = [_linear(job, p) for p in linears]
    rows = job.expert_rows
    forward += [_of_experts(job, p, rows) for p in layer.experts]
    again = forward[:-1] if job.config.ac not in ("none", "selective") else []
    if job.config.mlp_tile and not layer.experts:
        mlp = [_linear(job, p) for p in linears if _in_mlp(p)]
        if job.config.ac != "none":  # the recomputation of the layer skips the last tile
            before_last = (
                (-(-job.layout.local_len // job.config.mlp_tile) - 1) * job.config.mlp_tile / job.layout.local_len
            )
            tiled = [replace(p, flops=before_last * p.flops, elements=before_last * p.elements) for p in mlp]
            again = [_linear(job, p) for p in linears if not _in_mlp(p)] + tiled
        again = again + mlp[:-1]
    return forward, again


def head_products(job: Job) -> tuple[list[Product], list[Product]]:
    """Return the products with the vocabulary of one micro-batch's (forward, backward).

    The loss computes logits and both gradients in the forward; log-probabilities compute the logits again.
    """
    weights = job.model.head or job.model.embedding
    vocabulary = [(p.shape[0] / job.dims.tp, p.shape[1]) for p in weights if is_matrix(p)]
    logits = [Product.of(job.tokens, inner, rows, job.dtype.itemsize) for rows, inner in vocabulary]
    return {"loss": (3 * logits, []), "logprobs": (logits, 3 * logits)}.get(job.output, ([], []))


def attention_work(job: Job, ring: RingSchedule, heads: int, products: int) -> list[list[tuple[float, Task]]]:
    """Return the tasks of a sequence by ring step, each with the FLOPs of it in all sequences of a micro-batch.

    Both head dims are padded to the larger, as the kernels do.
    """
    per_pair = 2.0 * products * heads * max(job.model.facts.head_dim, job.model.facts.value_dim) * job.rows
    return [[(per_pair * _visible(task), task) for task in step.tasks] for step in ring.steps]


@lru_cache(maxsize=2**16)
def _visible(task: Task) -> int:
    return task.visible()


class LayerSeconds(NamedTuple):
    """Seconds of a decoder layer for one micro-batch, without attention's kernels."""

    forward: Seconds
    recompute: Seconds
    backward: Seconds


def layer_seconds(job: Job, hardware: Hardware, layer: LayerShape) -> LayerSeconds:
    """Return the time of a decoder layer's passes."""
    forward, again = layer_products(job, layer)
    memory = hardware.memory_seconds(sum(_layer_bytes(job, layer)))
    matmul, repeated = _matmul_seconds(job, hardware, forward), _matmul_seconds(job, hardware, again)
    shared = hardware.memory_seconds(_copied_bytes(job))
    recomputed = memory + shared if job.config.ac != "none" else 0.0
    return LayerSeconds(
        Seconds(matmul, 0.0, memory + shared),
        Seconds(repeated, 0.0, recomputed),
        Seconds(2 * matmul, 0.0, 2 * memory + shared),
    )


def _matmul_seconds(job: Job, hardware: Hardware, products: list[Product]) -> float:
    return sum(product.seconds(hardware, dtype_name(job.dtype)) for product in products)


def _layer_bytes(job: Job, layer: LayerShape) -> Iterator[float]:
    """Yield the bytes that a forward reads and writes outside of matrix products and attention."""
    facts, itemsize = job.model.facts, job.dtype.itemsize
    hidden = 2 * (_norm_bytes(itemsize) + RESIDUAL_PASSES * itemsize)
    yield hidden * job.outer_tokens * job.model.hidden_size
    head_dim = (facts.head_dim + facts.value_dim) / 2
    yield ROTARY_PASSES * job.tokens * (facts.num_heads + facts.num_kv_heads) * head_dim / job.dims.tp * itemsize
    if layer.experts:
        rows = job.expert_rows
        yield MLP_PASSES * rows * job.model.expert_size * itemsize
        yield 4 * rows * job.model.hidden_size * itemsize  # gathered by expert, and added back
    else:
        yield MLP_PASSES * job.tokens * facts.intermediate_size / job.dims.tp * itemsize


def _copied_bytes(job: Job) -> float:
    """Return the bytes that a layer's two gathers and two sums over tp read and write besides what they send.

    Tokens are the second dim: a reduce-scatter's input and an all-gather's output are copied into another order, the
    latter unless there is a single row; a functional all-reduce copies its input (torch.distributed).
    """
    if job.dims.tp == 1:
        return 0.0
    copies = 4 if job.config.tp_sequence_parallel and job.rows > 1 else 2
    return 2.0 * copies * job.tokens * job.model.hidden_size * job.dtype.itemsize


def head_seconds(job: Job, hardware: Hardware) -> tuple[Seconds, Seconds]:
    """Return the time of the output head in one micro-batch's (forward, backward)."""
    logits = job.tokens * job.model.facts.vocab_size / job.dims.tp
    casts = _casts(job.dtype.itemsize)
    forward, backward = (
        Seconds(_matmul_seconds(job, hardware, products), 0.0, hardware.memory_seconds(nbytes * logits))
        for products, nbytes in zip(head_products(job), _logit_bytes(job.output, casts), strict=True)
    )
    return forward, backward


def _logit_bytes(output: str, casts: int) -> tuple[float, float]:
    """Return the bytes per logit that the output head's forward and backward read and write.

    casts: bytes of a cast to fp32 in the forward, and of the gradient back.
    """
    if output == "loss":
        return LOGIT_PASSES * FLOAT32 + casts, 0.0
    if output == "logprobs":
        forward, backward = (number * FLOAT32 + casts / 2 for number in LOGPROB_PASSES)
        return forward, backward
    return 0.0, 0.0


def _norm_bytes(itemsize: int) -> int:
    """Return the bytes per element of an RMSNorm: square (2), mean (1) and product (2) in fp32; the weight; casts."""
    return 5 * FLOAT32 + 2 * itemsize + _casts(itemsize)


def _casts(itemsize: int) -> int:
    """Return the bytes per element of casts to fp32 and back."""
    return 2 * (itemsize + FLOAT32) if itemsize < FLOAT32 else 0


def attention_kernel(job: Job, hardware: Hardware, spec: AttentionSpec) -> str:
    """Return the name of the attention kernel that would run, as a file with its rates has it.

    Raises:
        ValueError: if the kernel that --attention-kernel asks for cannot compute the job's attention.
    """
    facts = job.model.facts
    kernel = kernel_on(
        hardware, job.config.attention_kernel, spec, job.dtype, facts.head_dim, facts.value_dim, job.layout
    )
    return kernel.rated_as or kernel.name


def ring_step_seconds(
    job: Job, hardware: Hardware, ring: RingSchedule, heads: int, kernel: str, *, backward: bool
) -> list[float]:
    """Return each ring step's attention compute for one layer and micro-batch, with the accumulation over steps."""
    products = BACKWARD if backward else FORWARD
    sums = 0.0
    if len(ring.steps) > 1:  # as `attention.accumulate` does: the last zigzag rank has all its queries in every step
        queries, itemsize = job.layout.ring_len * job.rows, job.dtype.itemsize
        cast = itemsize + FLOAT32 if itemsize < FLOAT32 else 0
        # Gradients are added to the float32 sum; outputs are cast, and the sum is interpolated with them.
        nbytes = 2 * FLOAT32 + itemsize if backward else cast + 3 * FLOAT32
        sums = hardware.memory_seconds(queries * heads * job.model.facts.value_dim * nbytes)

    @cache  # most tasks of a ring have the same shape
    def seconds(flops: float, side: int, full: bool) -> float:
        return hardware.attention_seconds(kernel, flops, side, dtype_name(job.dtype), backward=backward, full=full)

    return [
        sum(seconds(flops, min(task.rows, task.columns), task.full) for flops, task in tasks) + (sums if tasks else 0.0)
        for tasks in attention_work(job, ring, heads, products)
    ]


def held_elements(job: Job, rank: int) -> int:
    """Return the number of parameter elements that this rank stores and updates."""
    return sum(stage_units(job, stage).shard for stage in job.stages(rank))


def optimizer_seconds(job: Job, hardware: Hardware, rank: int) -> float:
    """Return the time of gradient norm, clipping and AdamW on this rank."""
    return hardware.memory_seconds(OPTIMIZER_BYTES * held_elements(job, rank))
