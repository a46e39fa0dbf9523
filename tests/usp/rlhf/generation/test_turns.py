"""Episodes of several turns on every mesh match one process that runs the model over the whole transcript."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.rlhf.environments.answers import Counts, Echo
from tests.usp.tiny import CONFIGS, VOCAB, drawn_model
from usp.data.chats import Chat
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.environments.episodes import Episodes, Observation, Processes
from usp.rlhf.generation.decoding import GeneratedResponse
from usp.rlhf.graph import Generate

from .test_generate import CONTEXT, GRIDS, built, letters, logprobs_of

HERE = importlib.import_module("tests.usp.rlhf.environments.answers").__file__
LENGTHS = (40, 3, 1, CONTEXT - 20, 7)
STOPS = tuple(range(0, VOCAB, 3))
TOKENS = {"Echo": 9, "Counts": 30, "Faults": 60}
FEW, ON_RANKS = (4, 7), {4: (3, 4, 7), 8: (0, 8)}


@dataclass(frozen=True)
class Example:
    prompt: np.ndarray
    answer: str
    chat: Chat
    row: str = ""


def examples() -> list[Example]:
    """The chat of every second one has a tool, which observations begin with."""
    draw = np.random.default_rng(0)
    chats = [Chat("", [], [{"name": "x"}] if number % 2 else None) for number in range(len(LENGTHS))]
    drawn = [(draw.integers(0, VOCAB, n), letters(draw.integers(0, VOCAB, 2).tolist())) for n in LENGTHS]
    return [Example(*each, chat) for each, chat in zip(drawn, chats, strict=True)]


def observe(observation: Observation, turn: Sequence[int], chat: Chat) -> list[int]:
    assert isinstance(observation, str)
    return [(ord(letter) - 256) % VOCAB for letter in (chat.tools or [{"name": ""}])[0]["name"] + observation]


def work(environment: str = "Echo", **different: object) -> Generate:
    episodes = Episodes(Processes(f"{HERE}:{environment}"), examples(), letters, observe, **different)  # type: ignore[arg-type]
    return Generate(max_new_tokens=TOKENS[environment], temperature=0, stop_ids=STOPS, episodes=episodes)


def on_grids(
    numbers: tuple[int, ...], environment: str, different: dict[str, object]
) -> dict[int, list[tuple[int, GeneratedResponse]]]:
    found = {}
    for number in numbers:
        mesh = ParallelMesh.create(GRIDS[number])
        own = range(mesh.rank("batch"), len(LENGTHS), mesh.size("batch"))
        prompts = [torch.from_numpy(examples()[index].prompt) for index in own]
        generator = built(CONFIGS["llama"](), mesh, slots=2)
        responses = generator.generate(
            prompts, work(environment, **different), [7 + index for index in own], [(0, index) for index in own]
        )
        found[number] = list(zip(own, responses, strict=True))
    return found


def alone(
    model: PreTrainedModel, example: Example, kind: type[Echo], max_turns: int
) -> tuple[list[int], list[int], Tensor, list[float], bool]:
    """The tokens, the turns of the policy's, log-probabilities by one forward, rewards, and whether it is done."""
    environment, ids, owners, rewards, done = kind(), example.prompt.tolist(), [], [], False
    environment.reset({"answer": example.answer})
    start, most = len(ids), TOKENS[kind.__name__]
    while not done and environment.turns < max_turns:
        turn: list[int] = []
        own = len(owners) - owners.count(0)
        while not (turn and turn[-1] in STOPS) and own + len(turn) < most and len(ids) + len(turn) < CONTEXT:
            with torch.no_grad():
                turn.append(int(model(torch.tensor([[*ids, *turn]])).logits[0, -1].argmax()))
        ids, owners = ids + turn, owners + [environment.turns + 1] * len(turn)
        observation, reward, done = environment.step(letters(turn))
        rewards.append(reward)
        observed = observe(observation, turn, example.chat)
        if done or own + len(turn) == most or environment.turns == max_turns or len(ids) + len(observed) >= CONTEXT:
            break
        ids, owners = ids + observed, owners + [0] * len(observed)
    return ids[start:], owners, logprobs_of(model, torch.tensor(ids))[start - 1 :], rewards, done


@pytest.mark.parametrize(("kind", "max_turns"), [(Echo, 8), (Echo, 2), (Counts, 5)])
@pytest.mark.slow(full=2)
def test_every_grid_matches_one_process(ranks: RankPool, exhaustive: bool, kind: type[Echo], max_turns: int) -> None:
    model = drawn_model(CONFIGS["llama"]())
    wanted = [alone(model, example, kind, max_turns) for example in examples()]
    assert len({done for *_, done in wanted}) == (1 if max_turns == 2 else 2)
    assert max(len(rewards) for *_, rewards, _ in wanted) == {2: 2, 8: 3, 5: 5}[max_turns]
    usual = {4: FEW if max_turns == 8 else (4,)}
    for size, numbers in (ON_RANKS if exhaustive else usual).items():
        for found in ranks.run(on_grids, size, numbers, kind.__name__, {"max_turns": max_turns}):
            for number, responses in found.items():
                for index, response in responses:
                    tokens, owners, logprobs, rewards, done = wanted[index]
                    where = f"{GRIDS[number]}, prompt {index}"
                    assert response.tokens.tolist() == tokens, where
                    assert response.turns is not None and response.turns.tolist() == owners, where
                    of_own = torch.tensor(owners) > 0
                    assert (response.logprobs - logprobs)[of_own].abs().max() <= 1e-5, where
                    assert not response.logprobs[~of_own].any(), where
                    assert list(response.rewards) == pytest.approx(rewards), where
                    assert response.score == pytest.approx(sum(rewards)) and response.finished == done, where


def with_experts(dims: ParallelDims) -> list[tuple[int, GeneratedResponse]]:
    mesh = ParallelMesh.create(dims)
    own = range(mesh.rank("batch"), len(LENGTHS), mesh.size("batch"))
    prompts = [torch.from_numpy(examples()[index].prompt) for index in own]
    samples = [(0, index) for index in own]
    responses = built(CONFIGS["mixtral"](), mesh, slots=2).generate(prompts, work("Counts"), [*own], samples)
    return list(zip(own, responses, strict=True))


@pytest.mark.slow
def test_ranks_that_share_experts_have_environments_of_their_own(ranks: RankPool) -> None:
    wanted = dict(ranks.run(with_experts, 1, ParallelDims())[0])
    for found in ranks.run(with_experts, 2, ParallelDims(ep=2)):
        for index, response in found:
            assert response.tokens.tolist() == wanted[index].tokens.tolist() and response.score == wanted[index].score
            torch.testing.assert_close(response.logprobs, wanted[index].logprobs, rtol=0, atol=1e-5)


def failing(failure: str) -> tuple[list[GeneratedResponse], list[dict[str, object]]]:
    asked = work("Faults", failure=failure)
    generator = built(CONFIGS["llama"](), ParallelMesh.create(GRIDS[0]))
    assert asked.episodes is not None
    asked.episodes.examples[1] = replace(examples()[1], answer="die")
    prompts = [torch.from_numpy(example.prompt) for example in examples()[1:3]]
    return generator.generate(prompts, asked, [0, 1], [(0, 1), (1, 2)]), asked.episodes.failures


def test_an_episode_whose_environment_dies_ends_alone(ranks: RankPool) -> None:
    ((dead, _), (failure,)), ((dropped, other), _) = (ranks.run(failing, 1, each)[0] for each in ("zero", "drop"))
    assert dead.score == 0 and np.isnan(dropped.score) and not dead.finished
    assert failure["error"] == "its process ended with exit code 7" and failure["prompt_index"] == 1
    assert other.score == 3 and other.finished
