"""Returns of turns, and advantages from them, match loops over the tokens of each transcript."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.usp.rlhf.simulate import alone, on_ranks
from usp.rlhf.algorithms.critic_free import GRPO, RLOO, grpo_advantages
from usp.rlhf.algorithms.ppo import PPO, PPOAdvantages
from usp.rlhf.environments.episodes import Episodes, Processes
from usp.rlhf.graph import Generate
from usp.rlhf.samples import Samples

DISCOUNT, SCALING = 0.6, 2.0
# (turn of each token after the prompt, 0 for the environment's; reward of each turn). An observation may be empty.
TRANSCRIPTS = (
    ((1, 1, 0, 0, 2, 2, 2, 3), (0.5, -1.0, 2.0)),
    ((1, 2, 2), (0.0, 1.0)),
    ((1, 1, 1, 1), (1.0,)),
    ((1, 0, 2, 0, 3, 0, 4, 5, 5), (0.0, 0.0, 0.25, 0.0, 3.0)),
)
PROMPT = 3


def episodes() -> Episodes:
    return Episodes(Processes("nothing.py:Nothing"), (), str, lambda observation, turn: [])


def samples() -> Samples:
    draw = torch.Generator().manual_seed(0)
    values: dict[str, list[torch.Tensor]] = {}
    for turns, rewards in TRANSCRIPTS:
        length = PROMPT + len(turns)
        of_token = torch.zeros(length, dtype=torch.int64)
        of_token[PROMPT - 1 : -1] = torch.tensor(turns)  # entry t is about token t + 1
        at_end = torch.zeros(length)
        for number, reward in enumerate(rewards, start=1):
            at_end[torch.nonzero(of_token == number).max()] = reward
        mask = (of_token > 0).float()
        one = {"tokens": torch.arange(length), "mask": mask, "turns": of_token, "turn_rewards": at_end}
        one |= {"score": torch.tensor(sum(rewards)), "finished": torch.tensor(True)}
        for name in ("values", "old_logprobs", "ref_logprobs"):
            one[name] = torch.randn(length, generator=draw)
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    return Samples(tuple(range(len(TRANSCRIPTS))), values)


def returns(rewards: tuple[float, ...]) -> list[float]:
    """The discounted return of each turn."""
    return [
        sum(SCALING * reward * DISCOUNT**later for later, reward in enumerate(rewards[turn:]))
        for turn in range(len(rewards))
    ]


def test_grpo_compares_each_turn_with_the_same_turn_of_the_others() -> None:
    options: dict[str, Any] = {"turn_discount": DISCOUNT, "reward_scaling": SCALING}
    grpo = GRPO(generate=Generate(group_size=4, episodes=episodes()), **options)
    assert not list(grpo.violations())
    found = grpo_advantages(grpo, samples(), alone)["advantages"]
    of_turns = [returns(rewards) for _, rewards in TRANSCRIPTS]
    for number, (turns, _) in enumerate(TRANSCRIPTS):
        wanted = []
        for turn in turns:
            others = [each[turn - 1] if turn <= len(each) else 0.0 for each in of_turns]
            column = torch.tensor(others, dtype=torch.float64)
            wanted.append(float((column[number] - column.mean()) / (column.std() + 1e-4)) if turn else 0.0)
        assert found[number][PROMPT - 1 : -1].tolist() == pytest.approx(wanted, rel=1e-5)
        assert not found[number][: PROMPT - 1].any()


@pytest.mark.parametrize("split", [((0, 1, 2, 3), ()), ((0, 3), (1, 2))])
def test_ppo_discounts_between_turns(split: tuple[tuple[int, ...], ...]) -> None:
    gamma, lam, kl = 0.9, 0.8, 0.3
    options: dict[str, Any] = {
        "turn_discount": DISCOUNT,
        "reward_scaling": SCALING,
        "gamma": gamma,
        "lam": lam,
        "kl": kl,
    }
    options |= {"generate": Generate(episodes=episodes()), "normalise_advantages": False, "value_norm": "none"}
    ppo, data = PPO(**options), samples()
    assert not list(ppo.violations())
    found = on_ranks([PPOAdvantages(ppo) for _ in split], data, split)
    for number, (turns, rewards) in enumerate(TRANSCRIPTS):
        own = [place for place, turn in enumerate(turns) if turn]
        at = [PROMPT - 1 + place for place in own]
        values = [float(data["values"][number][t]) for t in at] + [0.0]
        advantage, wanted = 0.0, []
        for place in reversed(range(len(own))):
            turn = turns[own[place]]
            last = place + 1 == len(own) or turns[own[place + 1]] != turn
            log_ratio = float(data["old_logprobs"][number][at[place]] - data["ref_logprobs"][number][at[place]])
            reward = SCALING * rewards[turn - 1] * last - kl * log_ratio
            discount = gamma * DISCOUNT if last else gamma
            advantage = reward + discount * values[place + 1] - values[place] + discount * lam * advantage
            wanted.insert(0, advantage)
        result = found.of([number])
        assert result["advantages"][0][at].tolist() == pytest.approx(wanted, rel=1e-5)
        sums = [a + v for a, v in zip(wanted, values, strict=False)]
        assert result["returns"][0][at].tolist() == pytest.approx(sums, rel=1e-5)


def test_without_a_discount_a_reward_is_of_the_whole() -> None:
    grpo = GRPO(generate=Generate(group_size=4, episodes=episodes()))
    scores = samples()["score"]
    whole = torch.stack(list(scores)).double()
    for found, mask, score in zip(
        grpo_advantages(grpo, samples(), alone)["advantages"], samples()["mask"], scores, strict=True
    ):
        assert found[mask > 0].unique().tolist() == pytest.approx(
            [float((score - whole.mean()) / (whole.std() + 1e-4))]
        )


def test_what_has_no_returns_of_turns_is_refused() -> None:
    of_episodes = Generate(group_size=4, episodes=episodes())
    assert "no returns of turns" in next(RLOO(turn_discount=0.5, generate=of_episodes).violations())
    assert "is of episodes" in next(GRPO(turn_discount=0.5).violations())
    assert "from 0 to 1" in next(GRPO(turn_discount=1.5, generate=of_episodes).violations())
    assert "but for their scaling" in next(GRPO(turn_discount=0.5, reward_bias=1, generate=of_episodes).violations())
    assert "remove one" in next(PPO(turn_discount=0.5, normalise_rewards=True, generate=of_episodes).violations())
