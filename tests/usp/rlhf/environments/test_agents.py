"""Agents behind the endpoint: every token is trained as it was sampled, and what a fault costs."""

from __future__ import annotations

import importlib
import json
import random
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from usp.data.chats import Chat
from usp.data.tokenizer import ByteTokenizer
from usp.hf.tokenizers import ChatTemplate
from usp.rlhf.environments.agents import AGENT, comparable, followed, message_of, read_message
from usp.rlhf.environments.episodes import Episodes, Processes, ids_between
from usp.rlhf.generation.decoding import GeneratedResponse, Rollout
from usp.rlhf.generation.partial import NOT_BEGUN, PER_TOKEN, Group, go_on, group_samples
from usp.rlhf.generation.turns import EpisodeRecord, Turns
from usp.rlhf.graph import Generate
from usp.rlhf.samples import Samples

from .test_episodes import CHATML

FILE = Path(__file__).with_name("agent.py")
BYTES, STOP = ByteTokenizer(), 1
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TOOLS = CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{{ message['tool_calls'] }}")


@dataclass(frozen=True)
class Example:
    row: str
    prompt: np.ndarray
    answer: str = "42"
    chat: Chat | None = None


class Sampled:
    """A policy without a model: turns of random ids, most of which are no text, or of `texts`. It keeps what it was
    asked and what it wrote."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.draw, self.texts = random.Random(0), list(texts)
        self.wrote: list[tuple[list[int], list[int], list[float]]] = []

    def __call__(self, rollout: Rollout) -> None:
        ids = [self.draw.randrange(2, 384) for _ in range(self.draw.randrange(6))]
        ids = BYTES.encode(self.texts.pop(0)).tolist() if self.texts else ids
        rollout.tokens = [*ids, STOP][: rollout.limit]
        rollout.stopped = rollout.tokens[-1] == STOP
        rollout.logprobs = [-self.draw.random() for _ in rollout.tokens]
        self.wrote.append((list(rollout.prompt), list(rollout.tokens), list(rollout.logprobs)))


def episodes_of(rows: Sequence[dict[str, Any]], template: str = CHATML, **different: Any) -> Episodes:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = template
    chats = ChatTemplate(tokenizer, "a test's", stops=(STOP,))
    settings = {"agent": different.pop("agent", f"{sys.executable} {FILE}"), "reward": "match"}
    options: dict[str, Any] = {"max_turns": 10**6, "max_observation_tokens": 10**6}
    options |= {"begin": lambda chat: chats.prompt(chat, guarded=True).tolist()}
    return Episodes(
        Processes(AGENT, different.pop("timeout", 60.0), settings, different.pop("seconds", 0.0)),
        [Example(json.dumps(row), BYTES.encode("a row")) for row in rows],
        BYTES.decode,
        lambda new, turn, chat: ids_between(BYTES.encode, chats, new, turn, chat),
        **(options | different),
    )


def played(episodes: Episodes, policy: Callable[[Rollout], None], tokens: int = 10**6) -> list[GeneratedResponse]:
    number = len(episodes.examples)
    rollouts = [Rollout([], seed, tokens, number=seed) for seed in range(number)]
    samples = [(index, index) for index in range(number)]
    turns = Turns(rollouts, episodes, samples, {}, leads=True, context=10**6, agents=4)
    while turns.waiting:
        for rollout in turns.go_on(wait=True):
            policy(rollout)
            turns.end_turn(rollout)
    episodes.processes.close()
    return turns.responses(lambda rollout: None)  # type: ignore[arg-type, return-value]


def violations(found: Sequence[GeneratedResponse], wrote: Sequence[tuple[list[int], list[int], list[float]]]) -> int:
    """How many turns are not trained once, as they were sampled, after what the policy had read then."""
    trained: list[tuple[list[int], list[int], list[float]]] = []
    for each in found:
        assert each.prompt is not None and each.branches is not None and each.turns is not None
        tokens, cut = [*each.prompt.tolist(), *each.tokens.tolist()], len(each.prompt)
        owners, logprobs = [0] * cut + each.turns.tolist(), [0.0] * cut + each.logprobs.tolist()
        branches = each.branches.tolist()
        for turn in range(1, max(owners) + 1):
            own = [place for place, owner in enumerate(owners) if owner == turn]
            begin = branches.index(branches[own[0]])
            whole = own == list(range(own[0], own[-1] + 1))
            before = tokens[begin : own[0]] if whole else []
            trained.append((before, [tokens[place] for place in own], [logprobs[place] for place in own]))
    asked = [(before, ids, pytest.approx(numbers, abs=1e-6)) for before, ids, numbers in wrote]
    return sum(each not in trained for each in asked) + abs(len(asked) - len(trained))


@pytest.mark.slow
def test_every_token_of_a_thousand_turns_is_trained_as_it_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rows = Sampled(), [{"kind": f"tree={turns}"} for turns in (60, 60, 70, 60)]
    found = played(episodes_of(rows), policy)
    assert len(policy.wrote) == 4 + 4 * 250 and violations(found, policy.wrote) == 0
    assert [each.score for each in found] == [60, 60, 70, 60] and all(each.finished for each in found)
    for each in found:
        assert each.branches is not None and each.branches.unique().tolist() == [0, 1, 2, 3]
    lost = [(before, BYTES.encode(BYTES.decode(ids)).tolist(), numbers) for before, ids, numbers in policy.wrote]
    assert violations(found, lost) > 500  # the ids of a text are not those that were sampled

    def encoded_again(self: Turns, told: Any, follow: Any = Turns._follow) -> list[Rollout]:
        rollouts = follow(self, told)
        for rollout in rollouts:
            rollout.prompt = BYTES.encode(BYTES.show(rollout.prompt)).tolist()
        return rollouts

    monkeypatch.setattr(Turns, "_follow", encoded_again)
    policy = Sampled()
    assert violations(played(episodes_of([{"kind": "tree=5"}]), policy), policy.wrote) > 0


def test_equal_requests_get_seeds_of_their_own_and_a_line_those_of_an_environment() -> None:
    seeds: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def noted(rollout: Rollout, policy: Sampled = Sampled(["same"] * 100)) -> None:  # noqa: B008
        seeds.setdefault(tuple(rollout.prompt), []).append((rollout.seed, rollout.before))
        policy(rollout)

    (found,) = played(episodes_of([{"kind": "tree=1"}]), noted)
    assert found.prompt is not None and seeds[tuple(found.prompt.tolist())] == [(0, 0)]
    of_all = [each for of_prompt in seeds.values() for each in of_prompt]
    assert len(of_all) == len(set(of_all)) == 5
    assert found.rewards == [0, 0, 0, 0, 1]


@pytest.mark.slow
def test_limits_end_an_episode_and_no_run() -> None:
    for limits, turns in ({"max_turns": 3}, 3), ({"max_observation_tokens": 140}, 3), ({}, 3):
        policy = Sampled(["abc"] * 20)
        (found,) = played(episodes_of([{"kind": "endless"}], **limits), policy, 1000 if limits else 10)
        assert len(policy.wrote) == turns and violations([found], policy.wrote) == 0
        assert not found.finished and found.score == 0


@pytest.mark.slow
def test_a_fault_costs_its_own_episode() -> None:
    rows = [
        {"kind": kind, "prompt": [{"role": "user", "content": "?"}]}
        for kind in ("crash", "early", "scored", "linear=2")
    ]
    episodes = episodes_of(rows, failure="stop")
    policy = Sampled(["42"] * 5)
    crashed, early, scored, linear = played(episodes, policy)
    failures = {each["prompt_index"]: each for each in episodes.failures}
    errors = [each["error"] for each in failures.values()]
    assert errors == ["it raised RuntimeError: the agent exited with code 1"] * 2
    # A text of the policy ends no run, an agent that fails without one may.
    assert [failures[number]["blame"] for number in range(2)] == ["text", "environment"]
    assert crashed.score == 0 and np.isnan(early.score) and not len(early.tokens) and early.prompt is None
    assert scored.score == 1 and scored.finished and violations([crashed, scored, linear], policy.wrote) == 0
    assert linear.score == 1 and linear.rewards == [0, 1]


REFUSED = set[str]()  # episodes whose first connection a busy service has reset


class Service(BaseHTTPRequestHandler):
    """A service that asks once, and then replies what its row says, with a status."""

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["row"]["kind"] == "busy" and asked["OPENAI_API_KEY"] not in REFUSED:
            REFUSED.add(asked["OPENAI_API_KEY"])
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        headers = {"Authorization": f"Bearer {asked['OPENAI_API_KEY']}"}
        body = json.dumps({"messages": [{"role": "user", "content": asked["row"]["kind"]}]}).encode()
        if not asked["row"].get("early"):
            urlopen(Request(f"{asked['OPENAI_BASE_URL']}/chat/completions", body, headers)).close()
        self.send_response(asked["row"].get("status", 200))
        self.end_headers()
        self.wfile.write(asked["row"]["reply"].encode())


def test_a_service_plays_episodes_as_a_command_does() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        rows: list[dict[str, Any]] = [
            {"kind": "told", "reply": '{"reward": 2.5}'},
            {"kind": "scored", "reply": "null"},
            {"kind": "busy", "reply": '{"reward": 1.5}'},
            {"kind": "broken", "reply": "why", "status": 500},
            {"kind": "no JSON", "reply": "{"},
            {"kind": "early", "reply": "why", "status": 500, "early": True},
        ]
        episodes, policy = episodes_of(rows, agent=f"http://127.0.0.1:{server.server_port}/play"), Sampled(["42"] * 5)
        told, scored, busy, broken, unread, early = played(episodes, policy)
        server.shutdown()
    found = [told, scored, busy, broken, unread]
    assert [each.score for each in found] == [2.5, 1, 1.5, 0, 0] and np.isnan(early.score)
    assert violations(found, policy.wrote) == 0 and len(policy.wrote) == 5
    failures = {each["prompt_index"]: each for each in episodes.failures}
    assert {number: each["blame"] for number, each in failures.items()} == {3: "text", 4: "text", 5: "environment"}
    assert "the agent failed: OSError: HTTP Error 500" in failures[5]["error"] and "why" in failures[5]["error"]


@pytest.mark.slow
def test_an_agent_that_takes_too_long_is_ended() -> None:
    episodes = episodes_of([{"kind": "hang"}], timeout=1.5)
    (hung,) = played(episodes, Sampled())
    (failure,) = episodes.failures
    assert failure["error"] == "a step took longer than 1.5 seconds" and hung.score == 0 and not hung.finished
    episodes, policy = episodes_of([{"kind": "hang"}], seconds=2.5), Sampled()
    (ended,) = played(episodes, policy)  # as at a limit of turns
    assert not episodes.failures and ended.score == 0 and not ended.finished and violations([ended], policy.wrote) == 0


@pytest.mark.slow
def test_what_the_endpoint_does_not_support_is_refused() -> None:
    policy = Sampled()
    played(episodes_of([{"kind": "refusals"}]), policy)
    text = BYTES.decode(policy.wrote[0][0])
    for said in (
        "401 the key is not OPENAI_API_KEY",
        "400 the request is no JSON object",
        "400 not supported: n = 2",
        "400 not supported: stop = ['x']",
        "400 a message must have a role, and text under content: no images",
        "400 messages must be a list",
        "400 prompt must be one text, not ids or several",
        "400 not supported: echo = True, messages = [",
        "404 there is no POST /v1/embeddings",
        '400 a reward must be {"reward": NUMBER}',
    ):
        assert said in text


def test_calls_of_tools_go_out_and_their_results_come_in() -> None:
    policy = Sampled([f"Adding. {CALL}", "3"])
    (found,) = played(episodes_of([{"kind": "tools"}], TOOLS), policy)
    assert found.score == 1 and violations([found], policy.wrote) == 0 and len(policy.wrote) == 2
    assert "<|im_start|>tool\n3" in BYTES.show(policy.wrote[1][0])
    assert message_of(f"Adding. {CALL[:-14]}", tools=True)["content"] == f"Adding. {CALL[:-14]}"
    assert message_of(CALL, tools=False)["content"] == CALL


def test_a_conversation_goes_on_from_its_longest_reply() -> None:
    known: dict[int, list[str]] = {}

    def follows(*messages: dict[str, Any], tools: str = "") -> int | None:
        return followed(known, comparable(tools, [read_message(each) for each in messages]))

    def add(*messages: dict[str, Any]) -> None:
        known[len(known)] = comparable("", [read_message(each) for each in messages])

    hello = {"role": "user", "content": "Hi."}
    assert follows(hello) is None
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}]
    add(hello, {"role": "assistant", "content": None, "tool_calls": calls})
    again = {"role": "assistant", "content": " ", "refusal": None, "annotations": []}
    again["tool_calls"] = [{**calls[0], "id": "y", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    result = {"role": "tool", "tool_call_id": "y", "content": "2"}
    assert follows(hello, again, result) == 0 and follows(hello, again, result, tools="others") is None
    two = {"role": "assistant", "content": "Two."}
    add(hello, again, result, two)
    assert follows(hello, again, result, {**two, "content": "Two.\n"}, hello) == 1
    assert follows(hello, two, hello) is None and follows(hello, again) is None  # other history, and nothing new


@pytest.mark.slow
def test_the_client_of_openai_streams_and_completes(tmp_path: Path) -> None:
    importlib.import_module("openai")
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, openai\n"
        "client = openai.OpenAI(max_retries=0)\n"
        "messages = [{'role': 'user', 'content': 'Hi.'}]\n"
        "tool = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}\n"
        "assert [model.id for model in client.models.list()] == ['policy']\n"
        "reply = client.chat.completions.create(model='m', messages=messages, tools=[tool])\n"
        "call, = reply.choices[0].message.tool_calls\n"
        "assert reply.choices[0].finish_reason == 'tool_calls' and reply.usage.completion_tokens > 0\n"
        "messages += [reply.choices[0].message, {'role': 'tool', 'tool_call_id': call.id, 'content': '3'}]\n"
        "options = {'include_usage': True}\n"
        "with client.chat.completions.create(\n"
        "    model='m', messages=messages, tools=[tool], stream=True, stream_options=options\n"
        ") as stream:\n"
        "    chunks = list(stream)\n"
        "text = ''.join(chunk.choices[0].delta.content or '' for chunk in chunks if chunk.choices)\n"
        "assert text == 'three' and chunks[-1].usage.prompt_tokens and chunks[1].choices[0].finish_reason == 'stop'\n"
        "other = client.chat.completions.create(model='m', messages=messages[:1], max_completion_tokens=3)\n"
        "assert other.choices[0].finish_reason == 'length'\n"
        "first = client.completions.create(model='m', prompt='<s>Once', temperature=1.0)\n"
        "with client.completions.create(\n"
        "    model='m', prompt='<s>Once' + first.choices[0].text + ' there', stream=True, stream_options=options\n"
        ") as stream:\n"
        "    parts = list(stream)\n"
        "assert ''.join(part.choices[0].text for part in parts if part.choices) == ' was'\n"
        "assert parts[1].choices[0].finish_reason == 'stop' and parts[-1].usage.completion_tokens == 5\n"
        "print(json.dumps({'reward': len(other.choices[0].message.content)}))\n"
    )
    settings = {"agent": f"{sys.executable} {script}", "reward": "match"}
    episodes = replace(episodes_of([{}], TOOLS), processes=Processes(AGENT, 60.0, settings))
    policy = Sampled([CALL, "three", "three", " upon a time", " was"])
    (found,) = played(episodes, policy)
    assert episodes.failures == [] and found.score == 3
    assert violations([found], policy.wrote) == 0 and len(policy.wrote) == 5
    (_, _, _, (begun, written, _), (read, _, _)) = policy.wrote
    assert BYTES.show(begun) == "<s>Once" and read == [*begun, *written, *BYTES.encode(" there")]


Drawn = tuple[tuple[int, ...], int, float, int]  # what was read before a token, the token, log-probability, version


class Stepwise:
    """A policy that writes a token of every sequence at a time, which depends on its seed and its place alone; the
    log-probability depends on `version`, too. It keeps what it sampled."""

    def __init__(self) -> None:
        self.version, self.sampled = 0, list[Drawn]()

    def generate(self, prompts: Any, work: Generate, seeds: Any, samples: Any, *, begun: Any, enough: Any) -> Any:
        assert work.episodes is not None
        rollouts = Rollout.begin(prompts, work, seeds, (), 10**6)
        turns = Turns(rollouts, work.episodes, samples, {}, begun, enough, leads=True, context=10**6, agents=9)
        active = [*turns.first]
        while active or turns.waiting:
            active += turns.go_on(wait=True) if turns.waiting else []  # others are in the middle of a turn
            for rollout in [] if turns.ended else [*active]:
                draw = random.Random(f"{rollout.seed} {rollout.before + len(rollout.tokens)}")
                token, logprob = draw.choice((*range(40, 60), STOP, STOP)), -draw.random() - self.version
                self.sampled.append(((*rollout.prompt, *rollout.tokens), token, logprob, self.version))
                if rollout.take(token, logprob, lambda tokens: tokens[-1] == STOP):
                    active.remove(rollout)
                    turns.end_turn(rollout)
            if turns.ended:
                break
        return turns.responses(lambda rollout: torch.zeros(0))


def restored(groups: dict[int, Group]) -> dict[int, Group]:
    """Begun groups as a checkpoint gives them back."""
    found = {}
    for ticket, group in groups.items():
        extras = json.loads(json.dumps([each.record and each.record.to_extra() for each in group.responses]))
        flats = [{key: getattr(each, key).tolist() for key in PER_TOKEN} for each in group.responses]
        records = [EpisodeRecord.from_extra(*of) if of[0] else None for of in zip(extras, flats, strict=True)]
        pairs = zip(group.responses, records, strict=True)
        found[ticket] = replace(group, responses=tuple(replace(each, record=record) for each, record in pairs))
    return found


def in_parts(environment: str, parts: int, update: bool, resume: bool = False) -> tuple[Samples, list[Drawn]]:
    """The samples of groups that are complete after so many calls, each with other weights if they `update`, in a run
    that is resumed between them or not; and what was sampled."""
    rows = [{"kind": f"linear={turns}", "prompt": [{"role": "user", "content": "?"}]} for turns in (2, 5, 9, 9)]
    episodes = episodes_of(rows)
    if environment:
        episodes = replace(episodes, processes=Processes(environment), begin=None)
    work = Generate(group_size=2, max_new_tokens=400, episodes=episodes, partial=True)
    prompts = [torch.tensor(BYTES.encode("a row")) for _ in rows]
    groups = {3 + n: Group(prompt, n, (NOT_BEGUN,) * 2, n) for n, prompt in enumerate(prompts)}
    policy, before = Stepwise(), groups
    for part in range(parts):
        policy.version = part if update else 0
        last, wanted = part == parts - 1, len(rows) * (part + 1) // parts
        kept = {k: [r.tokens.tolist() for r in group.responses] for k, group in groups.items()}
        before, (groups, complete) = groups, go_on(groups, work, policy.version, lambda of: len(of) >= wanted, policy)  # noqa: B023
        groups, _ = go_on(groups, work, policy.version + 1, lambda of: True, policy)  # a step that has enough already
        assert len(complete) == len(rows) if last else wanted <= len(complete)
        assert kept == {k: [r.tokens.tolist() for r in group.responses] for k, group in before.items()}
        if resume:
            episodes.processes.close()
            episodes = replace(episodes, processes=episodes.processes.another())
            work, groups = replace(work, episodes=episodes), restored(groups)
    episodes.processes.close()
    assert not episodes.failures
    return group_samples([*groups.values()], range(2 * len(rows)), work), policy.sampled


def trained(samples: Samples) -> list[Drawn]:
    """What is trained of samples of one conversation each."""
    found = []
    for tokens, mask, logprobs, versions in zip(*(samples[key] for key in CHECKED), strict=True):
        for at in torch.nonzero(mask).flatten().tolist():
            ids = tokens.tolist()
            found.append((tuple(ids[: at + 1]), ids[at + 1], float(logprobs[at]), int(versions[at])))
    return sorted(found)


CHECKED = ("tokens", "mask", "logprobs", "versions")


def once(sampled: Sequence[Drawn]) -> list[Drawn]:
    return sorted((*before, float(np.float32(logprob)), version) for *before, logprob, version in sampled)


@pytest.mark.parametrize("environment", ["", f"{FILE.with_name('answers.py')}:Numbers"], ids=["agent", "environment"])
@pytest.mark.slow
def test_an_episode_goes_on_after_updates_and_in_a_resumed_run(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, sampled = in_parts(environment, 1, update=False)
    assert trained(whole) == once(sampled)
    for resume in (False, True):
        parts, sampled = in_parts(environment, 3, update=False, resume=resume)
        for key in (*CHECKED, "finished", "score", "turns", "turn_rewards"):  # of a frozen policy
            assert all(map(torch.equal, map(torch.atleast_1d, parts[key]), map(torch.atleast_1d, whole[key]))), key
        assert trained(parts) == once(sampled)
        updated, sampled = in_parts(environment, 3, update=True, resume=resume)
        assert trained(updated) == once(sampled)
        masked = zip(updated["versions"], updated["mask"], strict=True)
        assert any(len(versions[mask > 0].unique()) > 1 for versions, mask in masked)
    again, flat, response = Rollout.again, EpisodeRecord.flat, EpisodeRecord.response
    known = ("tokens", "logprobs", "versions")
    faults: list[tuple[Any, str, Any]] = [
        (EpisodeRecord, "flat", lambda self, version: flat(self, max(version - 1, 0))),
        (Rollout, "again", lambda self, to: replace(again(self, to), logprobs=[x - 1 for x in self.logprobs])),
        (Rollout, "again", lambda self, to: replace(again(self, to), known=0, **{key: [] for key in known})),
        (EpisodeRecord, "response", lambda *of: replace(response(*of), turns=response(*of).turns.clamp(min=1))),
    ]

    def twice(*of: Any) -> GeneratedResponse:
        found = response(*of)
        keys = ("tokens", "logprobs", "turns", "versions", *(("branches",) if found.branches is not None else ()))
        last = {key: torch.cat((getattr(found, key), getattr(found, key)[-1:])) for key in keys}
        return replace(found, **last)

    faults.append((EpisodeRecord, "response", twice))
    for kind, name, fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, fault)
            updated, sampled = in_parts(environment, 3, update=True)
            assert trained(updated) != once(sampled), name
