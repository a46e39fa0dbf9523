"""An agent as an environment: a command, or a service, whose requests to an OpenAI-compatible endpoint the policy
answers.

    agent --POST /v1/[chat/]completions--> endpoint --requests--> ranks, which generate them in one batch
    agent <------------ completion ------- endpoint <---replies-- ranks

The process of an episode serves one agent on the loopback. It tells the ranks which messages of a request are new and
which reply they follow, so that the ranks go on from the ids of that reply. The standard library alone is imported."""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from .outside import ENVIRONMENT, LONGEST, REWARD_CODE, TEXT, one_line, read_json
from .ready_rewards import HTTP, post, score
from .tool_calls import before_calls, calls_of

AGENT = "agent"  # the environment `AgentEnvironment`
ROUND = 0.01  # seconds in which further requests join a round
FOREVER = 1e6  # seconds: what an episode may last is bounded step by step
PAUSES = (0.1, 1.0)  # seconds before a service that has asked for nothing is asked again
# Sampling is what the flags of the run say, as training has to know it. Other keys of a request are refused.
KNOWN = {"max_tokens", "stream", "stream_options", "model", "user", "temperature", "top_p", "seed", "metadata", "store"}
OF_CHATS = {"messages", "tools", "max_completion_tokens", "chat_template_kwargs", "parallel_tool_calls"}
NEUTRAL: Any = {"n": [1], "tool_choice": ["auto", "none"], "response_format": [{"type": "text"}], "best_of": [1]}
Message: TypeAlias = dict[str, Any]
Waiting: TypeAlias = tuple[dict[str, Any], Future[dict[str, Any]]]  # a request as ranks are told, and their reply


class Refused(Exception):
    """The status of HTTP with which the endpoint refuses a request, and why."""


def followed(known: Mapping[int, list[str] | str], whole: list[str] | str) -> int | None:
    """Return the reply that a conversation, or a text, goes on from: of those that it begins with the longest, None
    without one. known: the conversations up to each reply, `comparable`, and texts."""
    begun = [(len(each), -number) for number, each in [*known.items()] if each == whole[: len(each)] != whole]
    return -max(begun)[1] if begun else None


def comparable(tools: Any, messages: Sequence[Message]) -> list[str]:
    """Return tools and messages so that those are equal which a policy reads alike: clients write a reply back with
    other keys, without the ids of its calls, or without whitespace around it."""
    same = [tools]
    for message in messages:
        content, others = message["content"], [message.get("name"), message.get("tool_call_id")]
        if message["role"] == "assistant":
            content, others = content.strip(), [call["function"] for call in message.get("tool_calls", ())]
        same.append([message["role"], content, others])
    return [json.dumps(each, sort_keys=True) for each in same]


def read_message(message: Any) -> Message:
    """Return a message of a request as chat templates take it. Raises Refused."""
    message = message if isinstance(message, dict) else {}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise Refused(400, "a message must have a role, and text under content: no images, audio or files")
    read: Message = {"role": "system" if role == "developer" else role, "content": content or ""}
    read |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    calls = message.get("tool_calls") or ()
    try:  # templates write the arguments as a value, where they are JSON
        named = [(call["id"], call["function"]["name"], call["function"]["arguments"] or "{}") for call in calls]
        functions = [(number, {"name": name, "arguments": read_json(text)}) for number, name, text in named]
    except (LookupError, TypeError, ValueError) as error:
        raise Refused(400, f"tool_calls are malformed: {error!r:.200}") from error
    listed = [{"id": number, "type": "function", "function": function} for number, function in functions]
    return {**read, "tool_calls": listed} if listed else read


def message_of(text: str, tools: Any) -> Message:
    """Return the policy's text as the message of a completion; its calls are apart if the request has tools and all of
    them can be read."""
    found = calls_of(text, tools) if isinstance(tools, list) else []
    calls = [call for call in found if not isinstance(call, str)]
    if not calls or len(calls) < len(found):
        return {"role": "assistant", "content": text}
    functions = [{"name": each.name, "arguments": json.dumps(each.arguments, ensure_ascii=False)} for each in calls]
    ids = [each.id or f"call_{secrets.token_hex(8)}" for each in calls]
    listed = [{"id": id_, "type": "function", "function": each} for id_, each in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": before_calls(text) or None, "tool_calls": listed}


def reward_of(value: Any) -> float | None:
    """Return the number of {"reward": NUMBER}, or None for anything else."""
    reward: Any = value.get("reward") if isinstance(value, dict) else None
    return float(reward) if type(reward) in (int, float) and math.isfinite(reward) else None


class Endpoint(ThreadingHTTPServer):
    """The endpoint of one episode, which `token` identifies. events: requests that wait, and how the agent failed, ""
    if it ended.
    posted: the last reward that came. refused: why a request was not answered. last: the text of the latest reply."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token, self.events = f"sk-{secrets.token_urlsafe(24)}", queue.SimpleQueue[Waiting | str]()
        self.posted: float | None = None
        self.refused = self.last = ""
        self._known: dict[int, list[str] | str] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left."""

    def chat(self, body: Mapping[str, Any]) -> Any:
        """Return the completion of a conversation. Raises Refused."""
        if not isinstance(listed := body.get("messages"), list) or not listed:
            raise Refused(400, "messages must be a list of objects")
        messages = [read_message(message) for message in listed]
        tools = (body.get("tools") or None) if body.get("tool_choice") != "none" else None
        given = {"tools": tools, "template": body.get("chat_template_kwargs") or {}}
        after = followed(self._known, comparable(given, messages))
        new = messages if after is None else messages[len(self._known[after]) - 1 :]
        reply = self._reply(body, OF_CHATS, {**given, "after": after, "new": new})
        message = message_of(reply["text"], tools)
        self._known[reply["number"]] = comparable(given, [*messages, read_message(message)])
        return completion(body, reply, message)

    def complete(self, body: Mapping[str, Any]) -> Any:
        """Return the completion of a text, which no template changes. Raises Refused."""
        prompt = body.get("prompt")
        if not isinstance(text := prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt, str):
            raise Refused(400, "prompt must be one text, not ids or several")
        after = followed(self._known, text)
        new = text if after is None else text[len(self._known[after]) :]
        reply = self._reply(body, {"prompt"}, {"tools": None, "template": {}, "after": after, "new": new})
        self._known[reply["number"]] = text + reply["text"]
        return completion(body, reply, reply["text"])

    def _reply(self, body: Mapping[str, Any], keys: set[str], request: dict[str, Any]) -> dict[str, Any]:
        """Return the policy's reply. Raises Refused, also for keys but `KNOWN` and these."""
        others = {key: value for key, value in body.items() if value and key not in KNOWN | keys}  # 0, false: default
        if wrong := [key for key, value in others.items() if value not in NEUTRAL.get(key, ())]:
            raise Refused(400, f"not supported: {', '.join(f'{key} = {body[key]!r:.80}' for key in wrong)}")
        limit, waiting = body.get("max_completion_tokens") or body.get("max_tokens"), Future[dict[str, Any]]()
        self.events.put(({**request, "limit": limit}, waiting))
        reply = waiting.result()
        if why := reply.get("refused"):
            raise Refused(400, why)
        self.last = reply["text"]
        return reply


class Handler(BaseHTTPRequestHandler):
    """A connection to an `Endpoint`."""

    protocol_version = "HTTP/1.1"
    server: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))  # of one that is refused, too
            if not secrets.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.server.token}"):
                raise Refused(401, "the key is not OPENAI_API_KEY of this episode")
            found, code = self._found(body or b"{}"), 200
        except Refused as error:
            code, self.server.refused = error.args
            found = {"error": {"message": error.args[1], "type": "invalid_request_error", "code": None}}
        data, kind = json.dumps(found).encode(), "application/json"
        if isinstance(found, list):
            lines = [*map(json.dumps, found), "[DONE]"]
            data, kind = "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def _found(self, body: bytes) -> Any:
        try:
            asked = dict(read_json(body))
        except (ValueError, TypeError) as error:
            raise Refused(400, f"the request is no JSON object: {error}") from error
        match self.command, self.path:
            case "GET", "/v1/models":
                return {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "usp"}]}
            case "POST", "/v1/chat/completions":
                return self.server.chat(asked)
            case "POST", "/v1/completions":
                return self.server.complete(asked)
            case "POST", "/v1/reward":
                if (reward := reward_of(asked)) is None:
                    raise Refused(400, 'a reward must be {"reward": NUMBER}')
                self.server.posted = reward
                return {}
        raise Refused(404, f"there is no {self.command} {self.path:.200}")


def completion(body: Mapping[str, Any], reply: Mapping[str, Any], said: Message | str) -> Any:
    """Return a completion of a message or a text, or if it is streamed its chunks: the whole reply, its end, and the
    usage if it is wanted."""
    stream, chats = body.get("stream"), isinstance(said, dict)
    common = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.get("model")}
    common["object"] = ("chat.completion.chunk" if stream else "chat.completion") if chats else "text_completion"
    read, written = reply["read"], reply["written"]
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reply["finish"]}
    content: dict[str, Any] = {"text": said}
    if isinstance(said, dict):
        calls = [{"index": at, **call} for at, call in enumerate(said.get("tool_calls", ()))]
        choice |= {"finish_reason": "tool_calls"} if calls else {}
        content = {"delta": {**said, "tool_calls": calls} if calls else said}
        content = content if stream else {"message": {**said, "refusal": None}}
    if not stream:
        return {**common, "choices": [{**choice, **content}], "usage": usage}
    end: dict[str, Any] = {"delta": {}} if chats else {"text": ""}
    parts = ({**choice, **content, "finish_reason": None}, {**choice, **end})
    chunks: list[Any] = [{**common, "choices": [part]} for part in parts]
    counted = (body.get("stream_options") or {}).get("include_usage")
    return [*chunks, {**common, "choices": [], "usage": usage}] if counted else chunks


class AgentEnvironment:
    """An environment that runs a command or asks a service, which asks the policy through an `Endpoint`.

    An observation is a JSON list of requests: after (the reply that it follows), new (messages or a text), tools,
    template and limit. A turn is a JSON list of replies to these: `refused`, or text, number, finish, and the tokens
    read and written.

    agent: the command, or the URL of the service. reward: scores the last reply of an agent that tells no reward.
    """

    def __init__(self, agent: str, reward: Callable[[str, str, str], float]) -> None:
        self._agent, self._reward, self.blames = agent, reward, ENVIRONMENT
        self._waiting: list[Waiting] = []
        self._over = False  # a request was beyond a limit of the episode

    def reset(self, sample: Mapping[str, Any]) -> None:
        self._sample, self._endpoint, self._told = sample, Endpoint(), None
        row = {**{key: sample[key] for key in ("prompt_index", "sample")}, **sample["row"]}
        place = {"OPENAI_BASE_URL": f"http://127.0.0.1:{self._endpoint.server_port}/v1"}
        place["OPENAI_API_KEY"] = self._endpoint.token

        def run() -> None:
            asks = self._agent.startswith(HTTP)
            try:
                self._told, failed = self._ask(row, place) if asks else _run(self._agent, row, place)
            except (OSError, ValueError) as error:
                failed = f"failed: {one_line(error)}"
            self._endpoint.events.put(failed)

        threading.Thread(target=run, daemon=True).start()

    def _ask(self, row: Message, place: Message, pauses: Sequence[float] = PAUSES) -> tuple[Any, str]:
        """Ask the service to play the episode of a row; return its reply. Raises OSError or ValueError without one."""
        try:
            return post(self._agent, {"row": row, **place}, timeout=FOREVER), ""
        except OSError:  # a busy service resets connections
            if not pauses or self.blames != ENVIRONMENT:
                raise
            time.sleep(pauses[0])
            return self._ask(row, place, pauses[1:])

    def step(self, turn: str) -> tuple[str | None, float, bool]:
        for (_, waiting), reply in zip(self._waiting, json.loads(turn or "[]"), strict=True):
            self._over |= bool(reply.get("over"))
            self.blames = TEXT  # what a command does after a reply may be due to that
            waiting.set_result(reply)
        events, told = self._endpoint.events, [self._endpoint.events.get()]
        while not isinstance(told[-1], str):
            try:
                told.append(events.get(timeout=ROUND))
            except queue.Empty:
                self._waiting = [each for each in told if not isinstance(each, str)]
                if len(asked := json.dumps([each for each, _ in self._waiting])) > LONGEST:
                    raise RuntimeError(f"the agent asks for more than {LONGEST:,} characters at a time") from None
                return asked, 0.0, False
        return None, self._score(told[-1]), True  # whoever else has asked is gone, too

    def _score(self, failed: str) -> float:
        """Return the reward of an agent that has ended. Raises RuntimeError for one that `failed`."""
        end = self._endpoint
        if (failed and not self._over) or self.blames == ENVIRONMENT:
            refused = f"; the endpoint refused: {end.refused}" if end.refused else ""
            raise RuntimeError(f"the agent {failed or 'ended without a request'}{refused}")
        told = reward_of(self._told)
        if (reward := told if told is not None else end.posted) is not None:
            return reward
        self.blames = REWARD_CODE
        return score(self._reward, self._sample, end.last)


def _run(command: str, row: Message, place: dict[str, str]) -> tuple[Any, str]:
    """Run a command with a row; return the value of its last line, None if that is no JSON, and how it failed."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(json.dumps(row).encode() + b"\n")
        given.seek(0)
        for name, value in place.items():  # this process has one episode
            os.environ[name] = value
        done = subprocess.run(shlex.split(command), stdin=given, stdout=printed, check=False)
        printed.seek(0)
        failed = f"exited with code {done.returncode}" if done.returncode else ""
        with suppress(ValueError):
            return read_json(printed.read().strip().split(b"\n")[-1]), failed
        return None, failed
