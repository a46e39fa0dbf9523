"""The saved activations of a decoder layer, and the temporaries of its backward, in bytes per rank and micro-batch.

Derived operator by operator from the models of `usp.hf.models.FAMILIES`: the tensors that autograd saves (a storage
counts once, even if several operators save it), and the gradients that are alive at a layer's peaks: in the middle of
its MLP, in the norm before it, and in the middle of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attention import HeadPlan
from usp.cost.job import Job, LayerShape
from usp.cost.traffic.sharding import FLOAT32


@dataclass(frozen=True)
class LayerActivations:
    """The activations of a layer, in bytes.

    Attributes:
        kept: from the forward until the backward.
        mlp, norm, attention: added to `kept` at the backward's peaks in the MLP, in the norm before it and in
            attention, without gradients of weights.
    """

    kept: int
    mlp: int
    norm: int
    attention: int


def layer_activations(job: Job, layer: LayerShape) -> LayerActivations:
    """Return the activations of one decoder layer for one micro-batch."""
    size, hidden = job.dtype.itemsize, job.model.hidden_size
    entering = job.outer_tokens * hidden * size  # hidden states between attention and MLP, and their gradients
    inside = (
        job.tokens * hidden * size if job.config.tp_sequence_parallel else entering
    )  # the input of attention or MLP
    region = norm_activations(job, job.outer_tokens, hidden) + inside
    if size == FLOAT32:  # without a cast a norm saves its input itself
        region += entering
    results = _attention_results(job)
    mlp, mlp_extra = _experts(job) if layer.experts else _dense(job)
    saved = 2 * region + results + _attention_inputs(job, layer) + mlp
    kept = again = saved  # of what is kept, `again` is what the operators of the layer save
    if job.config.ac != "none":
        kept = again = entering + (results + _kept_calls(job) if job.config.ac != "full" else 0)
        saved += entering if size < FLOAT32 else 0
    if job.config.ac == "selective":
        products = _products(job, layer)
        kept, again = kept + products.total, again + products.saved + products.saved_in_mlp
        mlp -= products.saved_in_mlp
    # The norm's backward is in float32: its gradient, that of the mean square with two factors, and their sum.
    norm = entering + job.outer_tokens * hidden * 4 * FLOAT32
    added = saved - again  # by recomputation
    return LayerActivations(
        kept=kept,
        mlp=added + mlp_extra + entering,
        norm=added - mlp + norm,
        attention=added - mlp - region + _attention_backward(job) + entering,
    )


def different_activations(job: Job) -> dict[int, LayerActivations]:
    """Return the activations of every different layer, by the first one that is like it."""
    return {index: layer_activations(job, job.model.layers[index]) for index in set(job.model.alike)}


def least_layer_bytes(job: Job, mlp_tile: int) -> int:
    """Return a lower bound of what one layer's backward needs, whatever is recomputed, offloaded or tiled."""
    options = [("none", 0), *((ac, tile) for ac in ("attention-saved", "full") for tile in (0, mlp_tile))]
    peaks = []
    for ac, tile in options:
        made = replace(job, config=replace(job.config, ac=ac, mlp_tile=tile))
        layers = different_activations(made).values()
        kept = [layer.kept if ac == "none" else 0 for layer in layers]
        peaks.append(
            max(own + max(each.mlp, each.norm, each.attention) for own, each in zip(kept, layers, strict=True))
        )
    return min(peaks)


@dataclass(frozen=True)
class SplitLayer:
    """A layer in the input half of a split backward, which frees nothing that the weight half needs. Bytes.

    Attributes:
        left: gradients kept for the weight half: of the outputs of all operators with weights, except the last product,
            whose output gradient the next layer has passed on.
        passed: the gradient that it passes on and that the previous layer keeps.
        inputs: saved only by products with weights; the weight half frees them first.
        peaks: (name, bytes beyond the forward's activations and what later layers keep).
    """

    left: int
    passed: int
    inputs: int
    peaks: tuple[tuple[str, int], ...]


def split_layer(job: Job, layer: LayerShape) -> SplitLayer:
    """Return the input half of one decoder layer's backward for one micro-batch.

    The output gradient of the last products of attention and MLP is that of the residual stream, gathered for them
    under `tp_sequence_parallel`.
    """
    size, hidden, facts, tp = job.dtype.itemsize, job.model.hidden_size, job.model.facts, job.dims.tp
    entering = job.outer_tokens * hidden * size
    gathered = job.tokens * hidden * size if job.config.tp_sequence_parallel else 0
    flowing = entering if job.config.tp_sequence_parallel else 0  # the residual stream's gradient, not needed later
    home = _sizes(job).home
    keys, values = (job.tokens * dim * facts.num_kv_heads // tp for dim in (facts.head_dim, facts.value_dim))
    normed = _has_head_norms(layer)
    mlp, mlp_inputs, mlp_peak = _split_experts(job) if layer.experts else _split_dense(job)
    inside = gathered or entering
    after_mlp = gathered + mlp + entering
    after_norm = after_mlp + entering
    in_attention = after_norm + gathered
    heads = in_attention + ((home + keys + values) + (home + keys if normed else 0)) * size
    after_attention = heads + entering
    peaks = [
        ("MLP, inputs", flowing + gathered + mlp_peak),
        ("norm, inputs", flowing + after_mlp + norm_work(job.outer_tokens * hidden)),
        ("attention, inputs", in_attention + _attention_backward(job)),
        ("first norm, inputs", after_attention + norm_work(job.outer_tokens * hidden)),
    ]
    if normed:
        peaks.append(("head norm, inputs", heads - home * size + norm_work(home)))
    return SplitLayer(after_attention - flowing, entering - flowing, 2 * inside + mlp_inputs, tuple(peaks))


def norm_work(numel: int) -> int:
    """Return the bytes of RMSNorm's backward if nothing is freed."""
    # In float32: the scaled gradient, that of the mean square, the square's derivative in two steps, their product.
    return 5 * numel * FLOAT32


def norm_activations(job: Job, rows: int, width: int) -> int:
    """Return the bytes that RMSNorm saves: the cast input, the normalized input, and a factor per row, no output."""
    cast = FLOAT32 if job.dtype.itemsize < FLOAT32 else 0
    return rows * width * (cast + job.dtype.itemsize) + rows * FLOAT32


def _has_head_norms(layer: LayerShape) -> bool:
    return any(p.name.endswith("q_norm.weight") for p in layer.parameters)


@dataclass(frozen=True)
class _Sizes:
    """Elements of attention's tensors on the busiest rank.

    `home` are the queries before Ulysses' exchange of tokens for heads and `home_out` the output after the exchange
    back; the others are the tensors in between.
    """

    home: int
    home_out: int
    queries: int
    keys: int
    values: int
    out: int
    lse: int


def _sizes(job: Job) -> _Sizes:
    facts, tp, ulysses = job.model.facts, job.dims.tp, job.dims.ulysses
    plan = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, ulysses)
    home = job.tokens * plan.num_heads
    queries, keys = (job.tokens * ulysses * width for width in (plan.q_width(0), plan.kv_width(0)))
    return _Sizes(
        home=home * facts.head_dim,
        home_out=home * facts.value_dim,
        queries=queries * facts.head_dim,
        keys=keys * facts.head_dim,
        values=keys * facts.value_dim,
        out=queries * facts.value_dim,
        lse=queries,
    )


def _attention_results(job: Job) -> int:
    """Return the bytes of attention's output and log-sum-exps, and of the output after Ulysses' exchange."""
    sizes = _sizes(job)
    out = sizes.out + (sizes.home_out if job.dims.ulysses > 1 else 0)
    return out * job.dtype.itemsize + sizes.lse * FLOAT32


def _kept_calls(job: Job) -> int:
    """Return the bytes of q, k and v that `attention-saved` keeps because they come from an exchange."""
    sizes = _sizes(job)
    return (sizes.queries + sizes.keys + sizes.values) * job.dtype.itemsize if job.dims.ulysses > 1 else 0


@dataclass(frozen=True)
class _Products:
    """The results of the matrix products that `selective` keeps, in bytes.

    Attributes:
        saved, saved_in_mlp: those that the operator behind a product saves as well, outside and inside of the MLP.
    """

    total: int
    saved: int
    saved_in_mlp: int


def _products(job: Job, layer: LayerShape) -> _Products:
    size, facts = job.dtype.itemsize, job.model.facts
    linears = [p for p in layer.parameters if len(p.shape) == 2]
    outputs = [  # a linear that tp does not shard has only this rank's share of the tokens
        (job.outer_tokens if p.tp_dim is None else job.tokens) * p.local(job.dims.tp)[0] for p in linears
    ]
    saved = 0
    if job.dims.ulysses == 1:
        saved += job.tokens * facts.num_kv_heads // job.dims.tp * facts.value_dim  # v; q and k are rotated
    if _has_head_norms(layer) and size == FLOAT32:  # these norms save their input itself
        saved += job.tokens * (facts.num_heads + facts.num_kv_heads) // job.dims.tp * facts.head_dim
    if layer.experts:
        rows = job.expert_rows
        in_mlp = rows * 2 * job.model.expert_size
        total = sum(outputs) + in_mlp + rows * job.model.hidden_size
    else:
        in_mlp = job.tokens * 2 * (facts.intermediate_size // job.dims.tp)
        total = sum(outputs[:-1])
    return _Products(total * size, saved * size, in_mlp * size)


def _attention_inputs(job: Job, layer: LayerShape) -> int:
    """Return the bytes of q, k and v, and of the norms of q and k if the layer has them."""
    sizes = _sizes(job)
    found = (sizes.queries + sizes.keys + sizes.values) * job.dtype.itemsize
    if _has_head_norms(layer):
        facts, tp = job.model.facts, job.dims.tp
        heads = (facts.num_heads + facts.num_kv_heads) // tp
        found += norm_activations(job, job.tokens * heads, facts.head_dim)
        if job.dtype.itemsize == FLOAT32:
            found += job.tokens * heads * facts.head_dim * FLOAT32
    return found


def _attention_backward(job: Job) -> int:
    """Return the bytes of the output gradient, and of the gradients of q, k and v with their float32 sums."""
    size = job.dtype.itemsize
    sizes = _sizes(job)
    cast, kv = FLOAT32 if size < FLOAT32 else 0, sizes.keys + sizes.values
    found = sizes.out * size + sizes.queries * (size + cast) + kv * (size + cast)
    if job.dims.ring > 1:  # keys, values and their gradients in transit
        found += kv * (3 * size + 3 * FLOAT32)
    return found


def _dense(job: Job) -> tuple[int, int]:
    """Return (saved bytes, bytes added at the peak) of a dense MLP: gate, its activation, up and their product; at the
    peak the gradients of activation, up and product are alive, and the product is freed."""
    columns = job.model.facts.intermediate_size // job.dims.tp
    if job.config.mlp_tile:  # saves nothing, and has one tile at a time
        rows = job.rows
        tile = min(job.config.mlp_tile, job.tokens // rows) * rows
        return 0, 6 * tile * columns * job.dtype.itemsize
    each = job.tokens * columns * job.dtype.itemsize
    return 4 * each, 2 * each


def _experts(job: Job) -> tuple[int, int]:
    """Return (saved bytes, bytes added at the peak) of the busiest rank's experts: rows sorted by expert, gate and up,
    activation, product, and returned rows; the router's logits and weights are neglected."""
    size, rows, own = job.dtype.itemsize, job.expert_rows, job.routed_rows
    columns, hidden = job.model.expert_size, job.model.hidden_size
    saved = (rows * (hidden + 4 * columns) + own * hidden) * size
    # The peak has the float32 gradient of the weighted sum, and that of the rows in transit to the experts.
    return saved, own * hidden * FLOAT32 + 2 * rows * hidden * size


def _split_dense(job: Job) -> tuple[int, int, int]:
    """Return the bytes of (gradients of gate and up, input of down, gradients of product, activation and up)."""
    each = job.tokens * job.model.facts.intermediate_size // job.dims.tp * job.dtype.itemsize
    return 2 * each, each, 3 * each


def _split_experts(job: Job) -> tuple[int, int, int]:
    """Return the bytes of (the gradients of results, gate and up; the rows and the input of down; the peak)."""
    rows = job.expert_rows * job.dtype.itemsize
    results, columns = rows * job.model.hidden_size, rows * job.model.expert_size
    return results + 2 * columns, results + columns, results + 4 * columns
