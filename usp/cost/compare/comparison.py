"""A comparison of methods: the traffic of a block and of a step, and the memory of a rank, on the wire and by the
paper's count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from usp.config import TrainConfig
from usp.cost.job import ONE_DOCUMENT, Data, Job, job_of
from usp.cost.memory.footprint import Footprint, largest_footprint
from usp.cost.methods import Batch, Method, config_for
from usp.cost.traffic.sent import Sent
from usp.cost.traffic.step_traffic import block_traffic, step_traffic
from usp.hf.models import ModelConfig, model_facts
from usp.hf.shapes import model_shape
from usp.model.facts import ModelShape

from .paper import TABLE_2, Row, expert_row, pipeline_row, unified_cost

BF16 = 2  # bytes: the paper's P, G and activations are in half precision
# The methods that are rows of Table 2, in its order.
_TABLE_2_METHODS = ("ulysses", "ring", "dp", "zero1", "usp+zero1", "usp+zero2", "usp+zero3", "tp", "tp-sp")
_ROWS = dict(zip(_TABLE_2_METHODS, TABLE_2, strict=True))


@dataclass(frozen=True)
class PaperCost:
    """Bytes of one block, forward and backward, in the paper's convention; see `usp.cost.compare.paper`."""

    parameters_printed: int
    parameters: int
    activations: int
    states: tuple[str, str, str]


@dataclass(frozen=True)
class Compared:
    """One method's costs in bytes.

    Attributes:
        problem: why the method is not feasible, else empty; a method with a problem has no other values.
        rank: the one with the highest peak memory; memory: its own.
        sender: the one that sends most in a step; step: what it sends.
        block_parameters, block_activations: sent by the sender's first layer in a step.
        paper: None for methods that Table 2 does not have.
        job: the step of the method.
    """

    method: str
    problem: str = ""
    degrees: str = ""
    rank: int = 0
    sender: int = 0
    block_parameters: tuple[Sent, ...] = ()
    block_activations: tuple[Sent, ...] = ()
    step: tuple[Sent, ...] = ()
    memory: Footprint | None = None
    paper: PaperCost | None = None
    job: Job | None = None

    @property
    def sent(self) -> int:
        """Bytes sent in the whole step."""
        return sum(part.nbytes for part in self.step)


def compare(
    methods: Sequence[Method],
    base: TrainConfig,
    model_config: ModelConfig,
    devices: int,
    batch: Batch,
    data: Data = ONE_DOCUMENT,
) -> list[Compared]:
    """Compare methods on `devices` ranks with `batch`, sequences of base.seq_len tokens, per step."""
    facts = model_facts(base.model, model_config)
    shape = model_shape(facts, model_config)
    found = []
    for method in methods:
        try:
            config = config_for(method, base, facts, devices, batch)
            found.append(_compared(method, job_of(config, model_config, devices, shape, data), batch.sequences))
        except ValueError as error:
            found.append(Compared(method.name, problem=str(error)))
    return found


def _compared(method: Method, job: Job, batch: int) -> Compared:
    memory, rank = largest_footprint(job)
    senders = [first + rank for first in job.ranks("pp", 0) for rank in job.ranks("ring", 0)]
    sent = {each: step_traffic(job, each) for each in senders}
    sender = max(sent, key=lambda each: sum(part.nbytes for part in sent[each]))
    parameters, activations = block_traffic(job, sender)
    return Compared(
        method=method.name,
        degrees=f"{job.dims} zero={job.config.zero}",
        rank=rank,
        sender=sender,
        block_parameters=parameters,
        block_activations=activations,
        step=sent[sender],
        memory=memory,
        paper=_paper_cost(method.name, job, batch),
        job=job,
    )


def _paper_cost(method: str, job: Job, batch: int) -> PaperCost | None:
    """Return the cost that the paper gives a method for this model's d, L and GQA group size."""
    facts, hidden, row = job.model.facts, job.model.hidden_size, _paper_row(method, job.model)
    if row is None:
        return None
    cost = row.activation_cost(job.world_size)
    if job.dims.sp > 1:
        cost = unified_cost(job.dims.ulysses, job.dims.ring, facts.num_heads // facts.num_kv_heads)
    return PaperCost(
        parameters_printed=_bytes(row.printed_parameter_cost() * hidden**2),
        parameters=_bytes(row.parameter_cost() * hidden**2),
        activations=_bytes(cost * batch * job.config.seq_len * hidden),
        states=row.states,
    )


def _paper_row(method: str, model: ModelShape) -> Row | None:
    if method == "ep":
        return expert_row(model.experts_per_token)
    return pipeline_row() if method == "pp" else _ROWS.get(method)


def _bytes(elements: Fraction) -> int:
    return int(elements * BF16)
