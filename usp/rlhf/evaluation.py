"""Evaluation during training: responses to held-out prompts, scored as in training, with the weights of the moment.

The calls of training that lead to a score run again, on the same ranks and weight copies, with their own sampling.
Every evaluation has the same prompts and noise, so evaluations differ only by the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import comb, sqrt
from typing import Any

import torch

from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.runtime.measure import StepLengths
from usp.train.step import Evaluations

from .algorithms.rewards import ScoreWith
from .config import RlhfConfig
from .datasets import Example, known_of, prompt_samples
from .environments.benchmarks import by_row
from .environments.episodes import Processes
from .environments.ready_rewards import BENCHMARK, REWARD
from .graph import ROUTED, Compute, DataflowGraph, Generate, ModelCall
from .samples import Samples, derived_seed, fingerprint

SCORE = "score"
COLLECTED = (SCORE, "finished", "tokens", "prompt_length", "logprobs", "turns", "turn_rewards")


class Evaluator:
    """Evaluator of the current weights of an executor. Every rank calls every method, in the same order.

    prompts: to evaluate on; every rank has all of them.
    """

    def __init__(
        self,
        config: RlhfConfig,
        executor: Executor,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        prompts: Sequence[Example],
        progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self._config, self._training, self._graph, self._prompts = config, executor, graph, prompts
        self._progress, self._scoring = progress, dict[str, Any]()
        if prompts[0].benchmark:  # whose rewards score instead of the run's
            self._scoring = {"reward": by_row, "pool": Processes(REWARD, config.reward_timeout, {"reward": BENCHMARK})}
        self.change_plan(plan)
        self._given = prompt_samples(prompts, range(len(prompts)), self._evaluated.given)
        # Scores can be compared if they have this in common.
        works = (call.work for call in self._evaluated.calls if isinstance(call.work, Generate))
        by = {"environment": config.environment or config.agent}
        sampling = [{**asdict(replace(work, episodes=None)), **by} for work in works]
        known = [config.seed, sampling, [(example.prompt.tolist(), example.answer) for example in prompts]]
        self.past = Evaluations(fingerprint(known), name="scores")

    def change_plan(self, plan: ExecutionPlan) -> None:
        """Evaluate under the plan that the executor now runs. Collective."""
        self._evaluated, plan = evaluation_step(self._graph, plan, self._prompts, self._config, self._scoring)
        collect = tuple(key for key in COLLECTED if key in self._evaluated.producers)
        self._executor = self._training.another(self._evaluated, plan, collect=collect, progress=self._progress)

    def due(self, step: int) -> bool:
        """Return whether an evaluation follows a step; before the first one, 0, those of benchmarks come."""
        return step == self._config.steps or (step % self._config.eval_every == 0 and bool(step or self._scoring))

    def run(self, step: int) -> tuple[dict[str, float], Samples | None]:
        """Return the metrics of an evaluation, the same on every rank, and on rank 0 the first responses. Raises as
        `Executor.run_step`."""
        begin, config = time.perf_counter(), self._config
        result = self._executor.run_step(self._given, step, derived_seed(config.seed, "evaluation"))
        lengths = StepLengths.of_step(self._evaluated, result.lengths).responses
        names = [example.benchmark for example in self._prompts]
        metrics = evaluation_metrics(result.numbers, lengths, config.eval_samples, config.eval_pass_score, names)
        if step:  # what nothing has trained is never the best
            self.past.values[step] = metrics["eval/score"]
        return {**metrics, "eval/seconds": time.perf_counter() - begin}, result.samples


def evaluation_step(
    graph: DataflowGraph, plan: ExecutionPlan, prompts: Sequence[Example], config: RlhfConfig, scoring: Any = None
) -> tuple[DataflowGraph, ExecutionPlan]:
    """Return the graph and the plan of an evaluation: the calls of training that lead to the score, where they are.

    prompts: whose answers a reward function gets. scoring: fields of `ScoreWith` that differ.
    """
    needed = {graph.producers[SCORE]}
    for call in reversed(graph.order):
        if call.name in needed:
            needed.update(graph.before(call.name))
    calls = tuple(_evaluated(call, prompts, config, scoring or {}) for call in graph.calls if call.name in needed)
    roles = {call.role for call in calls}
    elsewhere = tuple(train for role in graph.trained_roles if role in roles and (train := graph.train_call(role)))
    read = tuple(key for key in graph.given if any(key in call.inputs for call in calls))
    layouts = {call.name: plan[call.name] for call in (*calls, *elsewhere)}
    name = f"{plan.name}, evaluation"
    return DataflowGraph(calls, read, elsewhere), ExecutionPlan(name, layouts, plan.offload & roles)


def _evaluated(call: ModelCall, prompts: Sequence[Example], config: RlhfConfig, scoring: Any) -> ModelCall:
    work = call.work
    if isinstance(work, Generate):
        temperature = config.eval_temperature
        if temperature < 0:
            temperature = config.temperature if config.eval_samples > 1 else 0.0
        episodes = work.episodes and replace(work.episodes, examples=prompts)
        if episodes and work.partial:  # those of training hold what goes on in the next step
            episodes = replace(episodes, processes=episodes.processes.another())
        work = replace(work, group_size=config.eval_samples, temperature=temperature, episodes=episodes)
        work = replace(work, partial=False, routed=0)
        return replace(call, work=work, outputs=tuple(k for k in call.outputs if k not in ("versions", ROUTED)))
    if isinstance(work, Compute) and isinstance(work.function, ScoreWith):
        return replace(call, work=replace(work, function=replace(work.function, **known_of(prompts) | scoring)))
    return call


def evaluation_metrics(
    numbers: Mapping[str, Mapping[int, float]],
    lengths: Sequence[int],
    per_prompt: int,
    pass_score: float,
    names: Sequence[str] = (),
) -> dict[str, float]:
    """Return the metrics of all responses to all prompts; `per_prompt` consecutive ones are to the same prompt.

    numbers: "score" and "finished" of each response by id; lengths: in tokens. names: of the benchmark of each prompt:
        eval/NAME/... are the metrics of each, and eval/... those of the first.

    eval/score: mean, without responses that the reward function failed for, which do not pass. eval/pass@k: see
    `pass_at_k`, for powers of two up to per_prompt, and for per_prompt itself; a response passes with a score of at
    least `pass_score`. eval/pass@k_low and eval/pass@k_high: see `interval`. eval/response_length and
    eval/response_length_max in tokens. eval/finished: fraction that ends with a stop id.
    """
    found, prompts = dict[str, float](), len(lengths) // per_prompt
    ks = sorted({2**power for power in range(per_prompt.bit_length())} | {per_prompt})
    for name in dict.fromkeys(names or ("",)):
        chosen = [number for number in range(prompts) if not names or names[number] == name]
        ids = [number * per_prompt + each for number in chosen for each in range(per_prompt)]
        scores = torch.tensor([numbers[SCORE][i] for i in ids], dtype=torch.float32)
        passed = (scores >= pass_score).unflatten(0, (-1, per_prompt)).sum(1).tolist()  # both are float32
        metrics = {"score": scores.double().nanmean().item()}
        for k in ks:
            mean = sum(pass_at_k(per_prompt, n, k) for n in passed) / len(passed)
            low, high = interval(mean, len(passed))
            metrics |= {f"pass@{k}": mean, f"pass@{k}_low": low, f"pass@{k}_high": high}
        metrics["response_length"] = sum(lengths[i] for i in ids) / len(ids)
        metrics["response_length_max"] = float(max(lengths[i] for i in ids))
        metrics["finished"] = sum(numbers["finished"][i] for i in ids) / len(ids)
        found |= {f"eval/{name}/{key}": value for key, value in metrics.items() if name}
        found = {f"eval/{key}": value for key, value in metrics.items()} | found
    return found


def interval(mean: float, problems: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a mean over independent problems of numbers from 0 to 1: Wilson's score
    interval, which is exact in form for 0 and 1, and too wide for numbers between these."""
    z2 = 1.959964**2 / problems
    center, half = mean + z2 / 2, sqrt(max(0.0, z2 * (mean * (1 - mean) + z2 / 4)))
    return max(0.0, (center - half) / (1 + z2)), min(1.0, (center + half) / (1 + z2))


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that one of `k` out of `samples` responses is one of the `passed` (arXiv 2107.03374). The
    mean over prompts is an unbiased estimate of the probability that one of k new responses passes."""
    return 1 - comb(samples - passed, k) / comb(samples, k)
