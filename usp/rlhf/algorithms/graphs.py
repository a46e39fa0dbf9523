"""The graph of each algorithm.

prompt_ids -> generate -> reward, old and reference log-probabilities, values -> advantages -> train steps
tokens     -> weights (and reference log-probabilities) -> train step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from usp.rlhf.graph.calls import Compute, Generate, Inference, ModelCall, Objective, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph

from .objectives import ClippedPolicy, ClippedValue, NextToken
from .options import DPO, GRPO, PPO, RLOO, SFT, Options, PolicyOptions, ReinforcePlusPlus, ReMax, RewardModel
from .pairs import DirectPreference, PreferredScore
from .ppo import PPOAdvantages, Stateful
from .reinforce import grpo_advantages, reinforce_plus_plus_advantages, remax_advantages, rloo_advantages
from .scored_batch import batch_inputs, batch_outputs
from .weights import PairWeights, TokenWeights, Weighting

GREEDY = "greedy_"


@dataclass(frozen=True)
class Algorithm:
    """Attributes:
    options: the dataclass of its options, all of which have defaults.
    calls: options -> the calls of a step.
    given: options -> the keys that a step begins with.
    """

    options: type[Any]
    calls: Callable[[Any], tuple[ModelCall, ...]]
    given: Callable[[Any], tuple[str, ...]]


def build_graph(algorithm: str, options: Options) -> DataflowGraph:
    """The graph of a step of one of `ALGORITHMS`.

    A function of samples that remembers, see `stateful`, starts anew in each graph.

    Raises:
        ValueError: for an unknown algorithm, and naming every option that is wrong.
        TypeError: for another algorithm's options.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown: use {', '.join(ALGORITHMS)}")
    which = ALGORITHMS[algorithm]
    if type(options) is not which.options:
        raise TypeError(f"{algorithm} has the options {which.options.__name__}, not {type(options).__name__}")
    if violations := list(options.violations()):
        raise ValueError(f"{algorithm}: {'; '.join(violations)}")
    return DataflowGraph(which.calls(options), which.given(options))


def stateful(graph: DataflowGraph) -> dict[str, Stateful]:
    """By the call's name, the functions of samples that a checkpoint must keep the state of."""
    functions: dict[str, object] = {
        call.name: call.work.function for call in graph.calls if isinstance(call.work, Compute)
    }
    return {name: function for name, function in functions.items() if isinstance(function, Stateful)}


def _sft(options: SFT) -> tuple[ModelCall, ...]:
    weigh = TokenWeights(Weighting("token_mean", options.mini_batches))
    return (
        ModelCall("weights", "", Compute(weigh, scalars=()), ("tokens", "mask"), ("weights",)),
        _train("actor", NextToken(), options),
    )


def _reward_model(options: RewardModel) -> tuple[ModelCall, ...]:
    return (_pair_weights(options), _train("reward", PreferredScore(), options))


def _dpo(options: DPO) -> tuple[ModelCall, ...]:
    return (
        _pair_weights(options),
        _logprobs("ref", "ref_logprobs"),
        _train("actor", DirectPreference(options.beta, options.label_smoothing), options),
    )


def _ppo(options: PPO) -> tuple[ModelCall, ...]:
    advantages = PPOAdvantages.of(options)
    scalars = ("kl_coefficient", "explained_variance")
    return (
        *_experience(options),
        ModelCall("critic_inference", "critic", Inference("values"), ("tokens",), ("values",)),
        _advantages(advantages, options, inputs=("values",), per_token=("returns",), scalars=scalars),
        _train_actor(options),
        _train("critic", ClippedValue(options.value_eps_clip), options),
    )


def _grpo(options: GRPO) -> tuple[ModelCall, ...]:
    advantages = _advantages(partial(grpo_advantages, options), options, scalars=("informative",), grouped=True)
    return (*_experience(options), advantages, _train_actor(options))


def _rloo(options: RLOO) -> tuple[ModelCall, ...]:
    advantages = _advantages(partial(rloo_advantages, options), options, grouped=True)
    return (*_experience(options), advantages, _train_actor(options))


def _reinforce_plus_plus(options: ReinforcePlusPlus) -> tuple[ModelCall, ...]:
    advantages = _advantages(partial(reinforce_plus_plus_advantages, options), options)
    return (*_experience(options), advantages, _train_actor(options))


def _remax(options: ReMax) -> tuple[ModelCall, ...]:
    greedy = replace(options.generate, temperature=0.0)
    advantages = partial(remax_advantages, options)
    return (
        *_experience(options),
        _generate("greedy_generate", greedy, GREEDY),
        _score(options, GREEDY),
        _advantages(advantages, options, inputs=(f"{GREEDY}score", f"{GREEDY}finished")),
        _train_actor(options),
    )


def _experience(options: PolicyOptions) -> tuple[ModelCall, ...]:
    """Responses, their scores, and what the policy in its training layout and the reference say of them."""
    temperature = options.generate.temperature
    ref = (_logprobs("ref", "ref_logprobs", temperature),) if options.kl else ()
    return (
        _generate("actor_generate", options.generate),
        _score(options),
        _logprobs("actor", "old_logprobs", temperature),
        *ref,
    )


def _generate(name: str, work: Generate, prefix: str = "") -> ModelCall:
    keys = ("tokens", "mask", "logprobs", "finished", "prompt_length")
    return ModelCall(name, "actor", work, ("prompt_ids",), tuple(f"{prefix}{key}" for key in keys))


def _score(options: PolicyOptions, prefix: str = "") -> ModelCall:
    if options.reward is None:
        inputs, outputs = (f"{prefix}tokens",), (f"{prefix}score",)
        return ModelCall(f"{prefix}reward_inference", "reward", Inference("score"), inputs, outputs)
    score = replace(options.reward, prefix=prefix)
    return ModelCall(f"{prefix}reward", "", Compute(score, scalars=(score.output,)), score.inputs, (score.output,))


def _logprobs(role: str, output: str, temperature: float = 1.0) -> ModelCall:
    return ModelCall(f"{role}_inference", role, Inference("logprobs", temperature), ("tokens",), (output,))


def _advantages(
    function: Callable[..., Any],
    options: PolicyOptions,
    *,
    inputs: tuple[str, ...] = (),
    per_token: tuple[str, ...] = (),
    scalars: tuple[str, ...] = (),
    grouped: bool = False,
) -> ModelCall:
    """inputs, per_token, scalars: keys beside those of every algorithm. grouped: a prompt's responses stay together."""
    common_per_token, common_scalars = batch_outputs(options)
    scalars = (*common_scalars, *scalars)
    work = Compute(function, options.generate.group_size if grouped else 1, scalars)
    outputs = (*common_per_token, *per_token, *scalars)
    return ModelCall("advantages", "", work, (*batch_inputs(options), *inputs), outputs)


def _pair_weights(options: SFT) -> ModelCall:
    work = Compute(PairWeights(options.mini_batches), unit=2, scalars=())
    return ModelCall("weights", "", work, ("tokens",), ("weights",))


def _train_actor(options: PolicyOptions) -> ModelCall:
    in_loss = not options.kl_in_reward
    objective = ClippedPolicy(
        eps_low=options.eps_low,
        eps_high=options.eps_high,
        kl=options.kl if in_loss else 0.0,
        kl_estimator=options.kl_estimator if isinstance(options, GRPO) else "k3",
        entropy_bonus=options.entropy_bonus,
        temperature=options.generate.temperature,
    )
    stop_above = ("importance_ratio", options.max_importance_ratio) if options.max_importance_ratio else None
    return _train("actor", objective, options, stop_above)


def _train(role: str, objective: Objective, options: Options, stop_above: tuple[str, float] | None = None) -> ModelCall:
    work = TrainStep(objective, options.mini_batches, options.epochs, stop_above)
    return ModelCall(f"{role}_train", role, work, ("tokens", *objective.keys))


def _prompts(options: PolicyOptions) -> tuple[str, ...]:
    return ("prompt_ids",) if options.reward is None else ("prompt_ids", "prompt_index")


ALGORITHMS = {
    "sft": Algorithm(SFT, _sft, lambda options: ("tokens", "mask")),
    "reward_model": Algorithm(RewardModel, _reward_model, lambda options: ("tokens",)),
    "dpo": Algorithm(DPO, _dpo, lambda options: ("tokens", "mask")),
    "ppo": Algorithm(PPO, _ppo, _prompts),
    "grpo": Algorithm(GRPO, _grpo, _prompts),
    "rloo": Algorithm(RLOO, _rloo, _prompts),
    "reinforce++": Algorithm(ReinforcePlusPlus, _reinforce_plus_plus, _prompts),
    "remax": Algorithm(ReMax, _remax, _prompts),
}
