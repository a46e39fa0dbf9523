"""The reference as the policy without its adapters, which needs no weights of its own."""

from __future__ import annotations

from dataclasses import replace

from usp.rlhf.graph.calls import Inference
from usp.rlhf.graph.dataflow import DataflowGraph

from .plan import CallLayout, ExecutionPlan


def policy_as_reference(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[DataflowGraph, ExecutionPlan]:
    """Let the actor, with its adapters off, make the calls of the role "ref" wherever it has weights in their layout.

    For an actor that trains adapters of the weights that "ref" begins with. Calls in other layouts keep the role.
    """
    layouts = {plan[call.name] for call in graph.calls if call.role == "actor"}
    train_call = graph.train_call("actor")
    # In a layout with the same degrees, without ZeRO, the actor's copy shares the memory of the trained one.
    in_place = {(at.ranks, at.dims) for at in [plan[train_call.name]] if not at.zero} if train_call else set()

    def shared(layout: CallLayout) -> bool:
        return layout in layouts or (not layout.zero and (layout.ranks, layout.dims) in in_place)

    calls = tuple(
        replace(call, role="actor", work=replace(call.work, adapters=False))
        if call.role == "ref" and isinstance(call.work, Inference) and shared(plan[call.name])
        else call
        for call in graph.calls
    )
    graph = DataflowGraph(calls, graph.given)
    return graph, replace(plan, offload=plan.offload & frozenset(graph.roles))
