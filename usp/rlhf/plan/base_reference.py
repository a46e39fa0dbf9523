"""The reference as the policy without its adapters, which needs no weights of its own."""

from __future__ import annotations

from dataclasses import replace

from usp.rlhf.graph.calls import Inference
from usp.rlhf.graph.dataflow import DataflowGraph

from .plan import CallLayout, ExecutionPlan


def policy_as_reference(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[DataflowGraph, ExecutionPlan]:
    """Let the actor, with its adapters off, make the calls of the role "ref" wherever it has weights in their layout.

    For an actor that trains adapters of the weights that "ref" has. Calls in other layouts keep the role.
    """
    layouts = {plan[call.name].of_weights for call in graph.calls if call.role == "actor"}
    train_call = graph.train_call("actor")
    trained = plan[train_call.name] if train_call else None

    def has_weights(layout: CallLayout) -> bool:
        # Without ZeRO, another layout with the degrees of the trained copy is in the same memory.
        alike = trained is not None and (trained.ranks, trained.dims, trained.zero) == (layout.ranks, layout.dims, 0)
        return layout.of_weights in layouts or (alike and layout.zero == 0)

    calls = tuple(
        replace(call, role="actor", work=replace(call.work, adapters=False))
        if call.role == "ref" and isinstance(call.work, Inference) and has_weights(plan[call.name])
        else call
        for call in graph.calls
    )
    graph = DataflowGraph(calls, graph.given)
    return graph, replace(plan, offload=plan.offload if "ref" in graph.roles else plan.offload - {"ref"})
