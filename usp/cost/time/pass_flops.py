"""The FLOPs of each pass on one rank, as kernels execute them: matrix products, and attention's visible pairs."""

from __future__ import annotations

from functools import cache

from usp.cost.job import PASSES, Job, Pass
from usp.cost.traffic.attention_traffic import attention_plan

from .compute import attention_work, head_products, layer_products
from .kernel_flops import BACKWARD, FORWARD


def pass_flops(job: Job, rank: int) -> dict[Pass, float]:
    """Return the FLOPs of each pass of all micro-batches. The loss's forward includes its gradients."""
    found = dict.fromkeys(PASSES, 0.0)

    @cache
    def attention(window: int, products: int) -> float:
        plan = attention_plan(job, rank, window)
        work = attention_work(job, plan.ring, plan.heads.q_width(plan.ulysses_rank), products)
        return sum(flops for tasks in work for flops, _ in tasks)

    for stage in job.stages(rank):
        for index, number in job.kinds(stage).items():
            products, again = (sum(p.flops for p in some) for some in layer_products(job, job.model.layers[index]))
            window = job.model.facts.windows[index]
            forward = attention(window, FORWARD)
            found["forward"] += number * (products + forward)
            if job.trained:
                found["recompute"] += number * (again + (forward if job.config.ac == "full" else 0.0))
                found["backward"] += number * (2 * products + attention(window, BACKWARD))
        if job.counts_choices:
            found["count"] = found["forward"]
        if stage == len(job.stage_layers) - 1:
            forward_head, backward_head = head_products(job)
            found["forward"] += sum(p.flops for p in forward_head)
            found["backward"] += sum(p.flops for p in backward_head) if job.trained else 0.0
    return {kind: job.config.micro_batches * flops for kind, flops in found.items()}
