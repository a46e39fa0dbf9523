"""What a decoder layer keeps for its backward, and what exists besides while the backward runs; bytes of one rank.

Read off the models of `usp.hf.integrate.FAMILIES` operator by operator, for one micro-batch: which tensors autograd
saves (a storage counts once, however many operators save it), and which gradients live at a layer's crests: in the
middle of its MLP, in the norm before, and in the middle of its attention.

T tokens of a rank of ring x ulysses, S those between attentions and MLPs (fewer where tensor-parallel ranks share
them), H hidden size, I columns of the MLP on this rank, Q and K elements of this rank's queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention import HeadPlan
from usp.cost.job import Job, LayerShape
from usp.cost.traffic.sharding import FLOAT32


@dataclass(frozen=True)
class LayerActivations:
    """Bytes.

    Attributes:
        kept: from the forward until the backward.
        saved: what recomputation adds to that when the backward begins.
        mlp, norm, attention: what the backward has added to `kept` at its crests in the MLP, in the norm before it and
            in attention; gradients of weights are not in it.
    """

    kept: int
    saved: int
    mlp: int
    norm: int
    attention: int


def layer_activations(job: Job, layer: LayerShape) -> LayerActivations:
    """Of one decoder layer, for one micro-batch."""
    size, hidden = job.dtype.itemsize, job.model.hidden_size
    entering = job.outer_tokens * hidden * size  # hidden states between regions, and their gradients
    inside = job.tokens * hidden * size if job.tp_sequence_parallel else entering  # what attention or MLP takes in
    region = norm_activations(job, job.outer_tokens, hidden) + inside
    if size == FLOAT32:  # nothing is cast, so a norm saves its input itself
        region += entering
    results = _attention_results(job)
    mlp, mlp_extra = _experts(job) if layer.experts else _dense(job)
    saved = 2 * region + results + _attention_inputs(job, layer) + mlp
    kept = saved
    if job.ac != "none":
        kept = entering + (results + _kept_calls(job) if job.ac == "attention-saved" else 0)
        saved += entering if size < FLOAT32 else 0
    # The norm's backward works in float32: its gradient, that of the square's mean with two factors, and their sum.
    norm = entering + job.outer_tokens * hidden * 4 * FLOAT32
    added = saved - kept
    return LayerActivations(
        kept=kept,
        saved=added,
        mlp=added + mlp_extra + entering,
        norm=added - mlp + norm,
        attention=added - mlp - region + _attention_backward(job) + entering,
    )


@dataclass(frozen=True)
class SplitLayer:
    """A layer in a backward of the inputs alone, which frees nothing: that of the weights is to come.

    Attributes:
        left: bytes of the gradients that the other half needs: those of the outputs of everything that has weights,
            but for the last product's, which the layer after has handed on.
        passed: bytes of what it hands on itself, where the layer before needs just that.
        inputs: bytes of what products with weights saved and nothing else did, which the other half frees first.
        crests: (name, bytes beside the forward's and what later layers left).
    """

    left: int
    passed: int
    inputs: int
    crests: tuple[tuple[str, int], ...]


def split_layer(job: Job, layer: LayerShape) -> SplitLayer:
    """Of one decoder layer, for one micro-batch.

    The last products of attention and MLP have the residual stream's gradient for theirs; where tensor-parallel ranks
    share the stream, one that is gathered for them.
    """
    size, hidden, facts, tp = job.dtype.itemsize, job.model.hidden_size, job.model.facts, job.dims.tp
    entering = job.outer_tokens * hidden * size
    gathered = job.tokens * hidden * size if job.tp_sequence_parallel else 0
    flowing = entering if job.tp_sequence_parallel else 0  # the stream's own gradient, which nobody needs later
    home, _, _ = _widths(job)
    keys = job.tokens * facts.head_dim * facts.num_kv_heads // tp
    normed = any(p.name.endswith("q_norm.weight") for p in layer.parameters)
    mlp, mlp_inputs, mlp_crest = _split_experts(job) if layer.experts else _split_dense(job)
    inside = gathered or entering
    after_mlp = gathered + mlp + entering
    after_norm = after_mlp + entering
    in_attention = after_norm + gathered
    heads = in_attention + ((home + 2 * keys) + (home + keys if normed else 0)) * size
    after_attention = heads + entering
    crests = [
        ("MLP, inputs", flowing + gathered + mlp_crest),
        ("norm, inputs", flowing + after_mlp + norm_work(job.outer_tokens * hidden)),
        ("attention, inputs", in_attention + _attention_backward(job)),
        ("first norm, inputs", after_attention + norm_work(job.outer_tokens * hidden)),
    ]
    if normed:
        crests.append(("head norm, inputs", heads - home * size + norm_work(home)))
    return SplitLayer(after_attention - flowing, entering - flowing, 2 * inside + mlp_inputs, tuple(crests))


def norm_work(numel: int) -> int:
    """RMSNorm's backward while nothing is freed, in float32: the gradient by its factor; that of the square's mean, the
    derivative of the square in two steps, and their product."""
    return 5 * numel * FLOAT32


def norm_activations(job: Job, rows: int, width: int) -> int:
    """RMSNorm over `rows` of `width`: its float32 input (where it is not float32 already), the normalised input in the
    compute dtype, and a factor per row. Its output is the next operator's to save."""
    cast = FLOAT32 if job.dtype.itemsize < FLOAT32 else 0
    return rows * width * (cast + job.dtype.itemsize) + rows * FLOAT32


def _widths(job: Job) -> tuple[int, int, int]:
    """Elements of this rank's queries (before and after Ulysses' exchange) and keys, those of the busiest rank."""
    facts, tp, ulysses = job.model.facts, job.dims.tp, job.dims.ulysses
    plan = HeadPlan(facts.num_heads // tp, facts.num_kv_heads // tp, ulysses)
    per_head = job.tokens * facts.head_dim
    return per_head * plan.num_heads, per_head * ulysses * plan.q_width(0), per_head * ulysses * plan.kv_width(0)


def _attention_results(job: Job) -> int:
    """Attention's output, its log-sum-exps, and the output after Ulysses' exchange."""
    home, queries, _ = _widths(job)
    lse = queries // job.model.facts.head_dim * FLOAT32
    return (queries + (home if job.dims.ulysses > 1 else 0)) * job.dtype.itemsize + lse


def _kept_calls(job: Job) -> int:
    """q, k and v where `attention-saved` keeps them: they came out of an exchange."""
    _, queries, keys = _widths(job)
    return (queries + 2 * keys) * job.dtype.itemsize if job.dims.ulysses > 1 else 0


def _attention_inputs(job: Job, layer: LayerShape) -> int:
    """q, k and v, and the norms of q and k where a layer has them."""
    _, queries, keys = _widths(job)
    found = (queries + 2 * keys) * job.dtype.itemsize
    if any(p.name.endswith("q_norm.weight") for p in layer.parameters):
        facts, tp = job.model.facts, job.dims.tp
        heads = (facts.num_heads + facts.num_kv_heads) // tp
        found += norm_activations(job, job.tokens * heads, facts.head_dim)
        if job.dtype.itemsize == FLOAT32:
            found += job.tokens * heads * facts.head_dim * FLOAT32
    return found


def _attention_backward(job: Job) -> int:
    """Gradients in the middle of attention: the output's, those of q, k and v as a kernel gives them and their float32
    sums; with a ring the keys, values and gradients on their way as well."""
    size = job.dtype.itemsize
    _, queries, keys = _widths(job)
    cast = FLOAT32 if size < FLOAT32 else 0
    found = queries * (2 * size + cast) + 2 * keys * (size + cast)
    if job.dims.ring > 1:
        found += 2 * keys * (3 * size + 3 * FLOAT32)
    return found


def _dense(job: Job) -> tuple[int, int]:
    """Saved: gate, its activation, up and their product; at the crest the gradients of the product, of the activation
    and of up are there, and the product is not. A tile at a time where the MLP is cut."""
    columns = job.model.facts.intermediate_size // job.dims.tp
    if job.mlp_tile:
        rows = job.rows // job.micro_batches
        tile = min(job.mlp_tile, job.tokens // rows) * rows
        return 0, 6 * tile * columns * job.dtype.itemsize
    each = job.tokens * columns * job.dtype.itemsize
    return 4 * each, 2 * each


def _experts(job: Job) -> tuple[int, int]:
    """Of rows sorted by expert: themselves, gate and up in one, the activation, the product, and what came home; the
    router's logits and weights are left out. Experts are chosen evenly."""
    size, rows = job.dtype.itemsize, job.outer_tokens * job.model.experts_per_token
    columns, hidden = job.model.expert_size, job.model.hidden_size
    saved = rows * (2 * hidden + 4 * columns) * size
    # backward: the float32 gradient of the weighted sum, and its rows' on their way to the experts
    return saved, rows * hidden * (FLOAT32 + 2 * size)


def _split_dense(job: Job) -> tuple[int, int, int]:
    """Gradients of gate and up; the input of down; the crest before: gradients of the product, the activation, up."""
    each = job.tokens * job.model.facts.intermediate_size // job.dims.tp * job.dtype.itemsize
    return 2 * each, each, 3 * each


def _split_experts(job: Job) -> tuple[int, int, int]:
    """Gradients of gate and up in one, and of results; rows and the input of down; the crest: also gate's and up's."""
    rows = job.outer_tokens * job.model.experts_per_token * job.dtype.itemsize
    results, columns = rows * job.model.hidden_size, rows * job.model.expert_size
    return results + 2 * columns, results + columns, results + 4 * columns
