"""Methods side by side: what a block and a step send, and what a rank keeps, on the wire and as the paper counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from usp.config import TrainConfig
from usp.cost.job import Job, job_of
from usp.cost.memory.footprint import Footprint, footprint
from usp.cost.methods import Method, config_for
from usp.cost.traffic.sent import Sent
from usp.cost.traffic.step_traffic import block_traffic, step_traffic
from usp.hf.models import ModelConfig, model_facts
from usp.hf.shapes import model_shape
from usp.model.facts import ModelShape

from .paper import BLOCK, TABLE_2, Row, expert_row, pipeline_row, unified_cost

BF16 = 2  # bytes: what the paper's P, G and activations are in
# Where a collective waits, and where it runs beside compute (`attention.ring`, FSDP2, torch's pipelines).
OVERLAP = {
    "ring": "hidden behind the attention of the block before",
    "ulysses": "waits",
    "tp": "waits",
    "ep": "waits",
    "pp": "hidden behind other micro-batches",
    "fsdp": "hidden behind the neighbouring layer",
    "efsdp": "hidden behind the neighbouring layer",
    "dp_replicate": "hidden behind the neighbouring layer",
    "loss": "hidden behind the neighbouring layer",
}
_ROWS = {row.method: row for row in TABLE_2}
_PAPER = {
    "ulysses": "SP-Ulysses",
    "ring": "SP-Ring",
    "dp": "DP",
    "zero1": "ZeRO1",
    "usp+zero1": "SP-Unified+ZeRO1",
    "usp+zero2": "SP-Unified+ZeRO2",
    "usp+zero3": "SP-Unified+ZeRO3",
    "tp": "TP",
    "tp-sp": "TP-sp",
}


@dataclass(frozen=True)
class PaperCost:
    """Bytes of one block, forward and backward, in the paper's convention; see `usp.cost.compare.paper`."""

    parameters_printed: int
    parameters: int
    activations: int
    states: tuple[str, str, str]


@dataclass(frozen=True)
class Compared:
    """One method; the numbers are of the rank with the highest peak, bytes.

    Attributes:
        problem: why this method cannot do the job; nothing else is known then.
        block_parameters, block_activations: what its first layer sends in a step.
        paper: None for mixtures that its table does not have.
    """

    method: str
    problem: str = ""
    degrees: str = ""
    rank: int = 0
    block_parameters: tuple[Sent, ...] = ()
    block_activations: tuple[Sent, ...] = ()
    step: tuple[Sent, ...] = ()
    memory: Footprint | None = None
    paper: PaperCost | None = None

    @property
    def sent(self) -> int:
        """Of the whole step."""
        return total(self.step)


def total(sent: Iterable[Sent]) -> int:
    return sum(part.nbytes for part in sent)


def compare(
    methods: Sequence[Method], base: TrainConfig, model_config: ModelConfig, devices: int, batch: int
) -> list[Compared]:
    """Every method on `devices` ranks with `batch` sequences of base.seq_len; what cannot run says why."""
    facts = model_facts(base.model, model_config)
    shape = model_shape(facts, model_config)
    found = []
    for method in methods:
        try:
            config = config_for(method, base, facts, devices, batch)
            found.append(_compared(method, job_of(config, model_config, devices, shape), batch))
        except ValueError as error:
            found.append(Compared(method.name, problem=str(error)))
    return found


def _compared(method: Method, job: Job, batch: int) -> Compared:
    firsts = [stage * job.world_size // job.dims.pp for stage in range(job.dims.pp)]
    memory, rank = max(((footprint(job, rank), rank) for rank in firsts), key=lambda pair: pair[0].peak.total)
    parameters, activations = block_traffic(job, rank)
    return Compared(
        method=method.name,
        degrees=f"{job.dims} zero={job.zero}",
        rank=rank,
        block_parameters=parameters,
        block_activations=activations,
        step=step_traffic(job, rank),
        memory=memory,
        paper=paper_cost(method.name, job, batch),
    )


def paper_cost(method: str, job: Job, batch: int) -> PaperCost | None:
    """The paper's costs of a method that it has, and of EP and PP, for this model's d, L and GQA."""
    facts, ranks = job.model.facts, job.world_size
    row = _paper_row(method, job.model)
    if row is None:
        return None
    hidden = job.model.hidden_size
    elements = batch * job.seq_len * hidden
    cost = row.activation_cost(ranks)
    if job.dims.sp > 1:
        cost = unified_cost(job.dims.ulysses, job.dims.ring, facts.num_heads // facts.num_kv_heads)
    return PaperCost(
        parameters_printed=_bytes(row.printed_parameter_cost() * hidden**2),
        parameters=_bytes(row.parameter_cost() * hidden**2),
        activations=_bytes(cost * elements),
        states=row.states,
    )


def _paper_row(method: str, model: ModelShape) -> Row | None:
    if method == "ep":
        return expert_row(model.experts_per_token)
    if method == "pp":
        return pipeline_row()
    return _ROWS.get(_PAPER.get(method, ""))


def _bytes(elements: Fraction) -> int:
    return int(elements * BF16)


__all__ = ["BLOCK", "Compared", "PaperCost", "compare", "paper_cost", "total"]
