"""The memory of a rank in forwards alone: weights, and at most what one layer or the output head needs."""

from __future__ import annotations

from collections.abc import Iterator

from usp.cost.job import Job
from usp.cost.traffic.pass_traffic import INT64
from usp.cost.traffic.sharding import FLOAT32, Unit, stage_units

from .stage_memory import Moment


def forward_memory(job: Job, rank: int) -> Moment:
    """Return the peak of a job that is not trained. Nothing is saved, and one layer's tensors exist at a time."""
    parameters = sum(stage_units(job, stage).shard for stage in job.stages(rank)) * job.weights.itemsize
    moments = (moment for stage in job.stages(rank) for moment in _moments(job, stage))
    peak = max(moments, key=lambda moment: moment.total)
    return peak.plus(parameters=parameters)


def _moments(job: Job, stage: int) -> Iterator[Moment]:
    units, size, facts, tp = stage_units(job, stage), job.dtype.itemsize, job.model.facts, job.dims.tp
    root = sum(_copied(job, unit) for unit in units.root)
    layers = [sum(_copied(job, unit) for unit in layer) for layer in units.layers]
    # ZeRO-3 has the current layer and the next one, the others have all.
    gathered = root + (sum(sorted(layers)[-2:]) if job.config.zero == 3 else sum(layers))
    hidden = job.tokens * job.model.hidden_size * size
    entering = job.outer_tokens * job.model.hidden_size * size
    heads = job.tokens * (2 * facts.num_heads * facts.value_dim + facts.num_kv_heads * facts.head_dim) // tp * size
    exchanged = 2 if job.dims.ulysses > 1 else 1
    ring = 2 * job.tokens * job.dims.ulysses * facts.num_kv_heads // tp // job.dims.ulysses * facts.head_dim * size
    attention = hidden + exchanged * heads + (ring if job.dims.ring > 1 else 0)
    if job.model.experts_per_token:
        rows = job.outer_tokens * job.model.experts_per_token
        mlp = rows * (2 * job.model.hidden_size + 3 * job.model.expert_size) * size
    else:
        tokens = min(job.config.mlp_tile or job.tokens, job.layout.local_len) * job.rows
        mlp = tokens * 3 * facts.intermediate_size // tp * size
    # Besides the layer's input: embeddings, rotary tables, ids, positions, labels and the indices of sequences.
    tables = 2 * job.tokens * facts.head_dim * size + 5 * job.tokens * INT64
    work = max(entering + hidden + mlp, attention)
    yield Moment("layer", whole=gathered, transient=2 * entering + tables + work)
    if stage == len(job.stage_layers) - 1 and job.output in ("loss", "logprobs"):
        chunk = min(job.config.loss_chunk, job.tokens) * facts.vocab_size // tp
        yield Moment(
            "head",
            whole=gathered,
            transient=hidden + entering + tables + chunk * (FLOAT32 + (size if size < FLOAT32 else 0)),
        )


def _copied(job: Job, unit: Unit) -> int:
    """Return the bytes of a unit's weights in a forward besides the stored shard."""
    whole = unit.ranks == 1 and job.weights == job.dtype
    return 0 if whole else unit.numel * job.dtype.itemsize
