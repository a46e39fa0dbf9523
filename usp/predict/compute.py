"""FLOPs of operators as they are called, and the compute of a rank in a step: FLOPs, and seconds on given hardware.

A multiply-add is two FLOPs. torch's own formulas count matrix products. Attention counts its products over the (query,
key) pairs that the kernel visits: all pairs of a rectangle, the lower triangle of a causal square, the band of each
packed sequence. The forward has 2 products (scores, output), the backward 5 (scores again, 4 gradients; Dao et al.
2022, arXiv 2205.14135, algorithms 1 and 4). Other operators (norms, activations, rotary embeddings, residuals, the
vocabulary's softmax, the optimizer) count nothing: they are memory-bound, and the constants below count their reads and
writes, operator by operator as in transformers' models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import compress, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from usp.attention import AttentionSpec, RingSchedule, band_pairs
from usp.model.facts import FLOAT8_DIMS, NO_ATTENTION, LayerShape, ParameterShape, training_flops, visible_pairs
from usp.parallel import Hardware
from usp.sp.kernel_choice import kernel_on

from .job import ADAPTER, Job, shared
from .traffic import FLOAT32, elements

aten = torch.ops.aten

FORWARD, BACKWARD = 2, 5  # products
VALUES = {FORWARD: 1, BACKWARD: 2}  # of these, products over the head dim of the values
Read = Callable[[Tensor], list[int]]
IN_PLACE: Mapping[Any, Any] = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # torch's formulas lack them


def matmul_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of a matrix product or convolution, 0 for any other operator."""
    packet = IN_PLACE.get(func.overloadpacket, func.overloadpacket)
    if packet is aten._grouped_mm:
        a, b = args[0], args[1]  # (rows, K) x (groups, K, N), or for a weight's gradient (M, rows) x (rows, N)
        return 2 * a.numel() * b.shape[-1]
    formula = None if packet in ATTENTION else flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


# Operator: products, position of q among its arguments (before k and v), position of the causal flag or of cu_seqlens.
ATTENTION: Mapping[Any, tuple[int, int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (FORWARD, 0, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (BACKWARD, 1, 7),
    aten._scaled_dot_product_efficient_attention: (FORWARD, 0, 6),
    aten._scaled_dot_product_efficient_attention_backward: (BACKWARD, 1, 11),
    aten._scaled_dot_product_cudnn_attention: (FORWARD, 0, 6),
    aten._scaled_dot_product_cudnn_attention_backward: (BACKWARD, 1, 14),
    aten._flash_attention_forward: (FORWARD, 0, 3),
    aten._flash_attention_backward: (BACKWARD, 1, 6),
}


def attention_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
    """Return the FLOPs of an attention kernel, 0 for any other operator; `read` is `Tensor.tolist` for `cu_seqlens`,
    whose values a fake tensor does not have."""
    if func.overloadpacket not in ATTENTION:
        return 0
    products, first, mask = ATTENTION[func.overloadpacket]
    query, key, value = (x.shape for x in args[first : first + 3])
    if len(query) == 4:  # (batch, heads, rows, head dim), and a causal flag
        (batch, heads, rows, size), columns = query, key[2]
        pairs = batch * (rows * (rows + 1) // 2 if any(args[mask : mask + 1]) else rows * columns)
    else:  # (tokens, heads, head dim), and cu_seqlens of q and k
        _, heads, size = query
        left, right = (kwargs.get(f"window_size_{side}", -1) for side in ("left", "right"))
        limits = None if right < 0 else -right, None if left < 0 else left
        lengths = [[stop - start for start, stop in pairwise(read(x))] for x in args[mask : mask + 2]]
        pairs = sum(band_pairs(rows, columns, columns - rows, *limits) for rows, columns in zip(*lengths, strict=True))
    of_values = VALUES[products]
    return 2 * heads * pairs * ((products - of_values) * size + of_values * value[-1])


FLOAT8 = ("float8", "mxfp8")  # in the peaks of hardware
# Rows of a tile of grouped_mm on Hopper (torch, aten/src/ATen/native/cuda/GroupMM.cu). The last one of each expert is
# half empty on average, so that it computes TILE / 2 rows more, of two FLOPs per element of its matrix.
TILE = 128
MX_CASTS = 2  # of each product, one kernel each
CAST_LAUNCHES, COPIES = 11, 9  # eager operators of a cast to float8; of a backward's copies and inverted scales
# Elements read and written by a forward outside of matrix products, as transformers' eager layers are written; a
# backward moves twice as many. Counted from their code, not measured.
NORM_PASSES = 5  # of an RMSNorm in fp32: square (2), mean (1) and product (2), besides the weight and casts
RESIDUAL_PASSES = 3  # two addends and a sum
ROTARY_PASSES = 10  # over q and k: products with cos and sin (4), a negated half (1), halves joined (2), a sum (3)
MLP_PASSES = 5  # over an MLP's hidden layer: the activation, and its product with the other half
# One kernel's in (forward, backward): a norm and its residual, each with its gradient; q and k, which a norm's backward
# reads again; gate, up and their result, and the gradients of all three; rows of experts, sorted and summed back.
FUSED_NORM, FUSED_ROTARY, FUSED_NORMED_ROTARY, FUSED_MLP, FUSED_SORTS = (4, 4), (2, 2), (2, 3), (3, 5), (3, 3)
FUSED_LOGITS = 2  # read, and their gradient written
# In fp32, per logit: maximum (1), difference and exponential (4), sum (1), gradient (4).
LOGIT_PASSES = 10
LOGPROB_PASSES = 6, 7  # of forward and backward: the same up to the sum; difference, exponential, gradient
# Operators of an eager layer's forward besides products; a backward has twice as many.
NORM_LAUNCHES = 8
LAYER_LAUNCHES = 2 * NORM_LAUNCHES + 2 * 5 + 2 + 1 + 2  # norms, rotations, an MLP's activation, attention, additions
EXPERT_LAUNCHES = 20  # choosing experts, sorting rows by expert and back
CHUNK_LAUNCHES = 9  # of each further chunk of experts: messages, rows by expert and back, products, activation
RING_LAUNCHES = 8  # per step after the first: two messages, attention, merging its output and lse
# Time of the host in operators, about as on a CPU under gloo: of a collective that FSDP2 or DTensor issues, without its
# message, and of a training step besides its layers (embedding, head, gradients' norm, optimizer).
COLLECTIVE_LAUNCHES, STEP_LAUNCHES = {"fsdp": 45.0, "efsdp": 45.0, "tp": 30.0}, 200
# Bytes per element: gradient read for the norm, and read and written by clipping; parameter and each state likewise.
CLIP_BYTES, UPDATE_BYTES = 4 + 8, 8


class Seconds(NamedTuple):
    """The time of compute, by what bounds it; `launch` is the waiting for a host that launches kernels too slowly."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3])

    def times(self, number: float) -> Seconds:
        return Seconds(number * self[0], number * self[1], number * self[2], number * self[3])


@dataclass(frozen=True)
class Product:
    """A matrix product: FLOPs, elements read and written, bytes of one, its own dtype, if it has one, and FLOPs that a
    GPU's tiles add."""

    flops: float
    elements: float
    itemsize: float
    dtype: str = ""
    added: float = 0.0

    @staticmethod
    def of(rows: float, inner: float, columns: float, itemsize: float, dtype: str = "") -> Product:
        elements = rows * inner + inner * columns + rows * columns
        return Product(2.0 * rows * inner * columns, elements, itemsize, dtype)

    def seconds(self, hardware: Hardware, dtype: str) -> float:
        """Return the time of the kernel or of reading and writing its operands, whichever is longer. The kernel runs at
        the rate of a square product: with as many FLOPs on a GPU, which a large product fills in any shape; on a
        processor with as many FLOPs per element, because caches must serve narrow products more often."""
        if not self.flops:
            return 0.0
        side = 1.5 * self.flops / self.elements  # of squares: 2 side^3 FLOPs of 3 side^2 elements
        square = self.flops + self.added if hardware.streams else 2 * side**3
        calls, dtype = 1.0 if hardware.streams else self.flops / square, self.dtype or dtype
        if dtype in FLOAT8:  # the part of its peak that a bfloat16 product reaches which takes as long
            square, dtype = square * hardware.peak("bfloat16") / hardware.peak(dtype), "bfloat16"
        kernel = hardware.matmul_seconds(square, dtype, calls)
        return max(kernel, hardware.memory_seconds(self.elements * self.itemsize))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_matrix(parameter: ParameterShape) -> bool:
    """Check whether a parameter outside of experts is a matrix, which multiplies every token."""
    return len(parameter.shape) == 2


def layer_products(job: Job, layer: LayerShape) -> tuple[list[Product], list[Product]]:
    """Return (products of one micro-batch's forward, those that its backward recomputes): not a layer's last, because
    only experts' weights need its result, and float8, which saves its operands after it; with `selective` no other."""
    linears, rows, forward = [p for p in layer.parameters if is_matrix(p)], job.expert_rows(job.outer_tokens), []
    for p in linears:  # one that tp does not shard multiplies only this rank's share of the tokens
        columns, inner = p.local(job.dims.tp)
        tokens = job.outer_tokens if p.tp_dim is None else job.tokens
        dtype = _float8_dtype(job) if p.float8(job.config.fp8, job.dims.tp) else ""
        # In float8 both operands have a byte; of the square's three matrices the result has as many as otherwise.
        itemsize = (2 + job.dtype.itemsize) / 3 if dtype in FLOAT8 else job.dtype.itemsize
        forward.append(Product.of(tokens, inner, columns, itemsize, dtype))
    for p in layer.experts:
        elements = p.numel / job.dims.ep + rows * sum(p.shape[1:])
        added, dtype = TILE * p.numel / job.dims.ep, _float8_dtype(job) if layer.float8_experts(job.config.fp8) else ""
        itemsize = (2 + job.dtype.itemsize) / 3 if dtype in FLOAT8 else job.dtype.itemsize
        forward.append(Product(2.0 * rows * math.prod(p.shape[1:]), elements, itemsize, dtype, added))
    needed = forward if forward[-1].dtype or layer.experts else forward[:-1]
    again = {"none": [], "selective": [last for last in forward[-1:] if last.dtype]}.get(job.config.ac, needed)
    if job.config.mlp_tile and not layer.experts:
        in_mlp = [".mlp." in f".{p.name}" for p in linears]
        mlp = list(compress(forward, in_mlp))
        if job.config.ac != "none":  # the recomputation of the layer skips the last tile
            tile, tokens = job.config.mlp_tile, job.layout.local_len
            share = (tokens - 1) // tile * tile / tokens
            again = [product for product, inside in zip(forward, in_mlp, strict=True) if not inside]
            again += [replace(p, flops=share * p.flops, elements=share * p.elements) for p in mlp]
        again = again + (mlp if forward[-1].dtype else mlp[:-1])
    return forward, again


def _float8_dtype(job: Job) -> str:
    return "float32" if job.config.emulates_float8 else FLOAT8[job.config.fp8 == "mx"]


def cast_bytes(job: Job, layer: LayerShape) -> tuple[float, float]:
    """Return the bytes that casts to float8 read and write in one micro-batch's (forward, backward) of a layer.

    torchao's code: a forward casts inputs, and with row scales weights; a backward casts both again, and gradients of
    outputs for each product. Its products take their operands in one order only, so that a backward copies inputs,
    gradients and weights. A compiled graph casts once what several linears take, and with tensor scales a gradient, and
    keeps maxima of inputs. Casts of shards of weights, before they are gathered, are not counted. MXFP8's casts are one
    kernel each, along either dim: the forward's of inputs and weights, the backward's of both and twice of gradients.
    """
    if job.config.fp8 == "mx":
        once = job.dtype.itemsize + 1 + 1 / FLOAT8_DIMS["mx"]  # a scale for each block
        shapes = [(job.tokens, *p.local(job.dims.tp), 1) for p in layer.parameters if p.float8("mx", job.dims.tp)]
        if layer.float8_experts("mx"):
            rows = job.expert_rows(job.outer_tokens)
            shapes += [(rows, *p.shape[1:], p.shape[0] // job.dims.ep) for p in layer.experts if len(p.shape) == 3]
        taken = sum(rows * inner + experts * columns * inner for rows, columns, inner, experts in shapes)
        return once * taken, once * (taken + 2 * sum(rows * columns for rows, columns, _, _ in shapes))
    forward = backward = 0.0
    size, row, fused, cast_inputs = job.dtype.itemsize, job.config.fp8 == "row", job.config.compile, set()
    # Read for the maximum and for the cast; eager, each of their six operators reads and writes, half of them float32.
    cast = 2 * size + 1 if fused else 4 * size + 25
    again = cast - size if fused and not row else cast
    for p in layer.parameters:
        if p.float8(job.config.fp8, job.dims.tp):
            columns, inner = p.local(job.dims.tp)
            of = (p.name.rsplit(".", 2)[0], inner) if fused and p.style.startswith("colwise") else p.name
            taken = 0 if of in cast_inputs else job.tokens * inner
            cast_inputs.add(of)
            made, weight = job.tokens * columns, inner * columns
            forward += cast * (taken + row * weight)
            backward += again * taken + cast * (made * (1 if fused and not row else 2) + row * weight)
            backward += 2 * (taken + made + weight)
    return forward, backward


def head_products(job: Job) -> tuple[list[Product], list[Product]]:
    """Return the products with the vocabulary of one micro-batch's (forward, backward): the loss computes logits and
    both gradients in the forward; log-probabilities compute the logits again."""
    weights = job.model.head or job.model.embedding
    vocabulary = [(p.shape[0] / job.dims.tp, p.shape[1]) for p in weights if is_matrix(p)]
    logits = [Product.of(job.tokens, inner, rows, job.dtype.itemsize) for rows, inner in vocabulary]
    passes = 2 if job.frozen else 3
    return {"loss": (passes * logits, []), "logprobs": (logits, passes * logits)}.get(job.output, ([], []))


def flops_per_pair(job: Job, heads: int, products: int) -> float:
    """Return the FLOPs of attention for each visible pair in all sequences of a micro-batch, both head dims padded to
    the larger, as the kernels do."""
    return 2.0 * products * heads * max(job.model.facts.head_dim, job.model.facts.value_dim) * job.rows


class RingWork(NamedTuple):
    """A ring step of one sequence: (visible pairs, shorter side, whether nothing is masked) of each task, and the
    tokens whose keys arrive for it and whose gradients leave it."""

    tasks: tuple[tuple[int, int, bool], ...]
    arriving: int
    leaving: int


@lru_cache(maxsize=256)
def ring_work(ring: RingSchedule) -> tuple[tuple[RingWork, ...], tuple[int, ...]]:
    """Return (the steps that differ, the number among these of each step): of a thousand steps, few do."""
    numbers: dict[RingWork, int] = {}
    order = []
    for step in ring.steps:
        tasks = tuple((task.visible(), min(task.rows, task.columns), task.full) for task in step.tasks)
        moved = (sum(message.tokens for message in messages) for messages in (step.receive, step.grad_send))
        order.append(numbers.setdefault(RingWork(tasks, *moved), len(numbers)))
    return tuple(numbers), tuple(order)


class LayerSeconds(NamedTuple):
    """Seconds of a decoder layer for one micro-batch, without attention's kernels, and its eager operators; `experts`
    are the seconds of experts' products in a forward."""

    forward: Seconds
    recompute: Seconds
    backward: Seconds
    launches: int
    experts: float


def _rates(hardware: Hardware) -> Hashable:
    """Return what determines the time of compute; the links between devices do not."""
    rates = hardware.memory_bytes_per_second, hardware.memory_efficiency, hardware.streams, hardware.compute_capability
    return id(hardware.peak_flops), id(hardware.attention), id(hardware.matmul), hardware.device, *rates


# The same object for all hardware with the same rates, which stays alive as long as that object may be found.
kernel_rates = shared(id)(shared(_rates)(lambda hardware: object()))


@shared(lambda job, hardware, index: (job.work, kernel_rates(hardware), index))
def layer_seconds(job: Job, hardware: Hardware, index: int) -> LayerSeconds:
    """Return the time of a decoder layer's passes."""
    layer = job.model.layers[index]
    forward, again = layer_products(job, layer)
    moved = _layer_bytes(job, layer, job.model.facts.windows[index])
    memory, memory_back = (hardware.memory_seconds(sum(each)) for each in zip(*moved, strict=True))
    matmul, repeated = _matmul_seconds(job, hardware, forward), _matmul_seconds(job, hardware, again)
    # What a layer's two gathers and two sums over tp copy besides what they send. Tokens are the second dim: a
    # reduce-scatter's input and an all-gather's output are copied into another order, the latter unless there is a
    # single row; a functional all-reduce copies its input (torch.distributed).
    copies = 0 if job.dims.tp == 1 else 4 if job.config.tp_sequence_parallel and job.rows > 1 else 2
    shared = hardware.memory_seconds(2.0 * copies * job.tokens * job.model.hidden_size * job.dtype.itemsize)
    recomputes, (casting, casting_back) = job.config.ac != "none", map(hardware.memory_seconds, cast_bytes(job, layer))
    memory_back, memory = memory_back + casting_back, memory + casting
    of_float8 = [product.dtype != "" for product in forward]
    # Frozen weights have no gradients, but torchao computes those of its linears.
    frozen = _matmul_seconds(job, hardware, list(compress(forward, of_float8))) if job.frozen else matmul
    others = LAYER_LAUNCHES + EXPERT_LAUNCHES * bool(layer.experts) + RING_LAUNCHES * (job.dims.ring - 1)
    others += 2 * NORM_LAUNCHES * layer.norms_heads + CHUNK_LAUNCHES * (job.ep_chunks - 1) * bool(layer.experts)
    launches = CAST_LAUNCHES * (5 if recomputes else 4) + COPIES
    if job.config.fp8 == "mx":
        launches = MX_CASTS * (4 if recomputes else 3)
    return LayerSeconds(
        Seconds(matmul, 0.0, memory + shared),
        Seconds(repeated, 0.0, memory + shared if recomputes else 0.0),
        Seconds(matmul + frozen, 0.0, memory_back + shared),
        (3 if job.trained else 1) * (len(forward) + others)
        + len(again)
        + (others if recomputes else 0)
        + sum(of_float8) * launches,
        _matmul_seconds(job, hardware, forward[len(forward) - len(layer.experts) :]),
    )


def _matmul_seconds(job: Job, hardware: Hardware, products: list[Product]) -> float:
    return sum(product.seconds(hardware, dtype_name(job.dtype)) for product in products)


def _layer_bytes(job: Job, layer: LayerShape, window: int) -> Iterator[tuple[float, float]]:
    """Yield the bytes that a (forward, backward) reads and writes outside of matrix products and attention."""
    facts, itemsize, stack = job.model.facts, job.dtype.itemsize, job.stack
    norm = NORM_PASSES * FLOAT32 + 2 * itemsize + _casts(itemsize)
    head_dim = (facts.head_dim + facts.value_dim) / 2 if window != NO_ATTENTION else 0.0

    def both(elements: float, eager: float, fused: tuple[int, int], fuses: bool = stack.fused) -> tuple[float, float]:
        forward, backward = (itemsize * passes for passes in fused) if fuses else (eager, 2 * eager)
        return forward * elements, backward * elements

    yield both(2 * job.outer_tokens * job.model.hidden_size, norm + RESIDUAL_PASSES * itemsize, FUSED_NORM)
    of_heads = ROTARY_PASSES * itemsize + (norm if layer.norms_heads else 0)
    heads = job.tokens * (facts.num_heads + facts.num_kv_heads) * head_dim / job.dims.tp
    yield both(heads, of_heads, FUSED_NORMED_ROTARY if layer.norms_heads else FUSED_ROTARY, stack.fused_rotary)
    if layer.experts:
        rows, fuses = job.expert_rows(job.outer_tokens), stack.fused_experts
        yield both(rows * job.model.expert_size, MLP_PASSES * itemsize, FUSED_MLP, fuses)
        sorts = 4 + 3 * (job.dims.ep > 1)  # by expert and back, with ep again where rows arrive, and their sum
        yield both(rows * job.model.hidden_size, sorts * itemsize, FUSED_SORTS, fuses)
    else:
        yield both(job.tokens * facts.intermediate_size / job.dims.tp, MLP_PASSES * itemsize, FUSED_MLP)


@shared(lambda job, hardware: (job.work, kernel_rates(hardware)))
def head_seconds(job: Job, hardware: Hardware) -> tuple[Seconds, Seconds]:
    """Return the time of the output head in one micro-batch's (forward, backward)."""
    rows = job.model.facts.vocab_size / job.dims.tp
    logits, weights = job.tokens * rows, 0.0 if job.frozen else job.model.hidden_size * rows
    casts = _casts(job.dtype.itemsize)  # to fp32 in the forward, and of the gradient back
    zeros, cast = FLOAT32 * weights, (FLOAT32 + job.dtype.itemsize) * weights  # of the weight's gradient in fp32
    nbytes = (0.0, 0.0)
    if job.output == "loss":
        per_logit = FUSED_LOGITS * job.dtype.itemsize if job.stack.fused_loss else LOGIT_PASSES * FLOAT32 + casts
        nbytes = per_logit * logits + zeros, cast
    elif job.output == "logprobs":
        first, second = (number * FLOAT32 + casts / 2 for number in LOGPROB_PASSES)
        nbytes = first * logits, second * logits + zeros + cast
    forward, backward = (
        Seconds(_matmul_seconds(job, hardware, products), 0.0, hardware.memory_seconds(moved))
        for products, moved in zip(head_products(job), nbytes, strict=True)
    )
    return forward, backward


def _casts(itemsize: int) -> int:
    """Return the bytes per element of casts to fp32 and back."""
    return 2 * (itemsize + FLOAT32) if itemsize < FLOAT32 else 0


def merge_bytes(itemsize: int, backward: bool, fused: bool) -> float:
    """Return the bytes per element of an addition to a ring's float32 sum: of gradients, or of outputs, which are cast
    first unless the kernels are fused."""
    return 2 * FLOAT32 + itemsize if backward or fused else _casts(itemsize) / 2 + 3 * FLOAT32


def attention_kernel(job: Job, hardware: Hardware, spec: AttentionSpec) -> str:
    """Return the name of the attention kernel that would run, as a file with its rates has it; raise ValueError if the
    one that --attention-kernel asks for cannot compute the job's attention."""
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
    if len(ring.steps) > 1:  # as `accumulate` does: the last zigzag rank has all its queries in every step
        queries, itemsize = job.layout.ring_len * job.rows, job.dtype.itemsize
        nbytes = merge_bytes(itemsize, backward, hardware.streams)
        sums = hardware.memory_seconds(queries * heads * job.model.facts.value_dim * nbytes)

    rate = partial(hardware.attention_seconds, kernel, dtype=dtype_name(job.dtype), backward=backward)
    per_pair, (different, order) = flops_per_pair(job, heads, products), ring_work(ring)
    each = [
        sum(rate(per_pair * pairs, side, full=full) for pairs, side, full in step.tasks) + (sums if step.tasks else 0.0)
        for step in different
    ]
    return [each[number] for number in order]


def sharing(job: Job, hardware: Hardware) -> int:
    """Return the number of ranks on a host."""
    return min(hardware.host_devices, job.world_size)


def optimizer_seconds(job: Job, hardware: Hardware, rank: int) -> float:
    """Return the time of gradient norm, clipping and update on this rank or its host, and of the update's products of
    whole matrices, which are divided among the ranks that share them."""
    nbytes = (CLIP_BYTES + UPDATE_BYTES * (1 + job.optimizer.states)) * elements(job, rank, "trained_shard")
    if job.config.optim_offload:
        return hardware.host_memory_seconds(nbytes, sharing(job, hardware))
    seconds = hardware.memory_seconds(nbytes)
    if (special := job.optimizer.of_matrices) is None:
        return seconds
    for index, number in job.kinds(*job.stages(rank)):
        layer = job.model.layers[index]
        trained = [p.shape for p in layer.parameters if is_matrix(p) and (ADAPTER in p.name or not job.frozen)]
        matrices = [(1 / (job.degree("fsdp") * job.dims.tp), min(shape), max(shape)) for shape in trained]
        for p in layer.experts if not job.frozen else ():
            matrices.append((p.shape[0] / (job.dims.ep * job.degree("efsdp")), min(p.shape[1:]), max(p.shape[1:])))
        for share, rows, columns in matrices:  # the short side first
            products = (Product.of(*sides, 2) for sides in special.products(rows, columns))
            each = special.times * sum(product.seconds(hardware, "bfloat16") for product in products)
            seconds += number * share * each
    return seconds


def model_flops(job: Job, *, masked: bool = False) -> int:
    """Return the model FLOPs of forward and backward of the global batch, recomputation not counted; `masked` counts
    what the causal mask and windows hide as work, too."""
    flops, hidden = _sequence_flops(job)
    return job.config.batch_size * job.dims.batch * (flops + (hidden if masked else 0))


@shared(lambda job: (job.model, job.boundaries))
def _sequence_flops(job: Job) -> tuple[int, int]:
    """Return (the model FLOPs of a sequence, those that its mask and windows hide)."""
    model, facts, tokens, adapters = job.model, job.model.facts, job.config.seq_len, 0
    weights = sum(p.numel for p in model.head or model.embedding if is_matrix(p))
    for index, number in Counter(model.alike).items():
        layer = model.layers[index]
        weights += number * sum(p.numel for p in layer.parameters if is_matrix(p) and ADAPTER not in p.name)
        weights += number * sum(p.numel // p.shape[0] * model.facts.experts_per_token for p in layer.experts)
        adapters += number * sum(p.numel for p in layer.parameters if ADAPTER in p.name)
    cut = torch.tensor([job.boundaries])
    reaches = Counter(reach for reach in facts.reaches if reach != NO_ATTENTION)
    pairs = sum(number * (tokens**2 - visible_pairs(cut, reach)) for reach, number in reaches.items())
    sizes = {"matmul_parameters": weights, "tokens": tokens, "adapter_parameters": adapters}
    flops = training_flops(facts, cu_seqlens=cut, **sizes)
    return flops, 6 * facts.num_heads * (facts.head_dim + facts.value_dim) * pairs
