"""An agent as an environment: a command whose requests to an OpenAI-compatible endpoint the policy answers.

    command --POST /v1/chat/completions--> endpoint --requests--> ranks, which generate them in one batch
    command <------------ completion ----- endpoint <---replies-- ranks

The process of an episode serves one command on the loopback. It tells the ranks which messages of a request are new and
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
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from .outside import ENVIRONMENT, LONGEST, REWARD_CODE, TEXT, read_json
from .tools import BEGIN, calls_of

AGENT = "agent"  # the environment `AgentEnvironment`
MODEL = "policy"
ROUND = 0.01  # seconds in which further requests join a round
TAIL = 1 << 16  # bytes of what a command prints that may hold its reward
# Sampling is what the flags of the run say, as training has to know it. Other keys of a request are refused.
KNOWN = {
    "messages",
    "prompt",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "chat_template_kwargs",
    "stream",
    "model",
}
KNOWN |= {"temperature", "top_p", "seed", "user", "metadata", "store", "stream_options", "parallel_tool_calls"}
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
}
Message: TypeAlias = dict[str, Any]
Said: TypeAlias = str | list[Message]  # of a conversation: a text, or messages


class Refused(Exception):
    """Why the endpoint does not answer a request. code: the status of HTTP."""

    def __init__(self, why: str, code: int = 400) -> None:
        super().__init__(why)
        self.code = code


@dataclass(eq=False)
class Request:
    """A request that waits. asked: what the ranks are told."""

    asked: dict[str, Any]
    reply: dict[str, Any] = field(default_factory=dict)
    answered: threading.Event = field(default_factory=threading.Event)


class Conversations:
    """The conversations of an episode: what was said up to each reply, by its number."""

    def __init__(self) -> None:
        self._known: list[tuple[int, str, str | list[str]]] = []

    def find(self, said: Said, given: str) -> tuple[int | None, Said]:
        """Return the reply that a text or messages go on from, the last of the longest conversation that they begin
        with, and what is new; None and all of them where they begin another. given: tools, which must be the same."""
        whole = _same(said)
        known = [each for each in self._known if each[1] == given and type(each[2]) is type(whole)]
        known = [each for each in known if len(each[2]) < len(whole) and whole[: len(each[2])] == each[2]]
        number, _, before = max(known, key=lambda each: len(each[2]), default=(None, "", ""))
        return number, said[len(before) :]

    def add(self, number: int, said: Said, given: str, reply: Any) -> None:
        """Remember a reply to `said`."""
        self._known.append((number, given, _same(said + reply if isinstance(said, str) else [*said, reply])))


def _same(said: Said) -> str | list[str]:
    """Return messages so that those are equal which a policy reads alike: clients write a reply back with other keys,
    without the ids of its calls, or without whitespace around it."""
    same = []
    for message in said if isinstance(said, list) else ():
        content, calls = message["content"], message.get("tool_calls", ())
        others = [message.get("name"), message.get("tool_call_id")]
        if message["role"] == "assistant":
            content, others = content.strip(), [call["function"] for call in calls]
        same.append(json.dumps([message["role"], content, others], sort_keys=True))
    return said if isinstance(said, str) else same


def read_message(message: Any) -> Message:
    """Return a message of a request as chat templates take it. Raises Refused."""
    message = message if isinstance(message, dict) else {}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise Refused("a message must have a role, and text under content: no images, audio or files")
    read: Message = {"role": "system" if role == "developer" else role, "content": content or ""}
    read |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    try:
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        described = [(name, {"name": f["name"], "arguments": _arguments(f["arguments"])}) for name, f in calls]
    except (LookupError, TypeError) as error:
        raise Refused(f"tool_calls are malformed: {error!r:.200}") from error
    called = [{"id": name, "type": "function", "function": function} for name, function in described]
    return {**read, "tool_calls": called} if called else read


def _arguments(text: str) -> Any:
    """Return the arguments of a call, JSON text, as their value, which chat templates write; a text without."""
    try:
        return read_json(text or "{}")
    except ValueError:
        return text


def message_of(text: str, tools: bool) -> Message:
    """Return the policy's text as the message of a completion; its calls are apart if the request has tools and all of
    them can be read."""
    calls = [call for call in calls_of(text) if tools and not isinstance(call, str)]
    if not calls or len(calls) < len(calls_of(text)):
        return {"role": "assistant", "content": text}
    functions = [{"name": name, "arguments": json.dumps(value, ensure_ascii=False)} for name, value in calls]
    listed = [{"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": each} for each in functions]
    return {"role": "assistant", "content": text[: text.index(BEGIN)].strip() or None, "tool_calls": listed}


def reward_of(value: Any) -> float | None:
    """Return the number of {"reward": NUMBER}, or None for anything else."""
    reward = value.get("reward") if isinstance(value, dict) else None
    good = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    return float(reward) if good else None


class Endpoint(ThreadingHTTPServer):
    """The endpoint of one episode, which `token` identifies. events: requests that wait, and the command's exit code.
    posted: the last reward that came. refused: why a request was not answered. last: the text of the latest reply."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token, self.events = f"sk-{secrets.token_urlsafe(24)}", queue.SimpleQueue[Request | int]()
        self.posted: float | None = None
        self.refused = self.last = ""
        self._conversations, self._lock = Conversations(), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left."""

    def complete(self, body: Mapping[str, Any], chat: bool) -> tuple[dict[str, Any], Message]:
        """Return the reply to a request, and its message. Raises Refused."""
        others = {key: value for key, value in body.items() if key not in KNOWN and value}  # 0 and false: the default
        if wrong := [key for key, value in others.items() if value not in NEUTRAL.get(key, ())]:
            raise Refused(f"not supported: {', '.join(f'{key} = {body[key]!r:.80}' for key in wrong)}")
        said: Any = body.get("messages" if chat else "prompt")
        if not said or not isinstance(said, list if chat else str):
            raise Refused("messages must be a list of objects" if chat else "prompt must be one text")
        said = [read_message(message) for message in said] if chat else said
        tools = (body.get("tools") or None) if body.get("tool_choice") != "none" else None
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or None
        if not isinstance(limit, int | None) or (limit or 1) < 1:
            raise Refused(f"max_tokens = {limit!r:.100} must be at least 1")
        asked = {"tools": tools, "template": body.get("chat_template_kwargs") or {}}
        given = json.dumps(asked, sort_keys=True)
        with self._lock:
            after, new = self._conversations.find(said, given)
        request = Request({**asked, "after": after, "new": new, "limit": limit})
        self.events.put(request)
        request.answered.wait()
        if why := request.reply.get("refused"):
            raise Refused(why)
        self.last = text = request.reply["text"]
        message = message_of(text, bool(tools)) if chat else {"content": text}
        with self._lock:
            self._conversations.add(request.reply["number"], said, given, read_message(message) if chat else text)
        return request.reply, message


class Handler(BaseHTTPRequestHandler):
    """A connection to an `Endpoint`."""

    protocol_version = "HTTP/1.1"
    server: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self._answer(self._models)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Callable[[], Any]) -> None:
        try:
            size = int(self.headers.get("Content-Length") or 0)
            if size > 16 * LONGEST:
                raise Refused(f"a request of {size:,} bytes", 413)
            self._body = self.rfile.read(size)  # also of one that is refused: the connection goes on
            if not secrets.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.server.token}"):
                raise Refused("the key is not OPENAI_API_KEY of this episode", 401)
            found, code = answer(), 200
        except Refused as error:
            found, code = {"error": {"message": str(error), "type": "invalid_request_error", "code": None}}, error.code
            self.server.refused = str(error)
        data, kind = json.dumps(found).encode(), "application/json"
        if isinstance(found, list):
            lines = [*map(json.dumps, found), "[DONE]"]
            data, kind = "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _models(self) -> dict[str, Any]:
        if self.path != "/v1/models":
            raise Refused(f"there is no GET {self.path:.200}", 404)
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "usp"}]}

    def _post(self) -> Any:
        try:
            body = dict(read_json(self._body))
        except (ValueError, TypeError) as error:
            raise Refused(f"the request is no JSON object: {error}") from error
        if self.path == "/v1/reward":
            if (reward := reward_of(body)) is None:
                raise Refused('a reward must be {"reward": NUMBER}')
            self.server.posted = reward
            return {}
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            raise Refused(f"there is no POST {self.path:.200}", 404)
        chat = self.path == "/v1/chat/completions"
        return completion(body, chat, *self.server.complete(body, chat))


def completion(body: Mapping[str, Any], chat: bool, reply: Mapping[str, Any], message: Message) -> Any:
    """Return a completion, or if it is streamed its chunks: the whole reply, its end, and the usage if it is wanted."""
    stream, ends = body.get("stream"), "tool_calls" if message.get("tool_calls") else reply["finish"]
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    common = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", "object": kind}
    common |= {"created": int(time.time()), "model": str(body.get("model") or MODEL)}
    read, written = reply["read"], reply["written"]
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": ends}
    if not stream:
        part = {"message": {**message, "refusal": None}} if chat else {"text": message["content"]}
        return {**common, "choices": [{**choice, **part}], "usage": usage}
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, "tool_calls": calls} if calls else message
    parts = ({"delta": delta, "finish_reason": None}, {"delta": {}})
    if not chat:
        parts = ({"text": message["content"], "finish_reason": None}, {"text": ""})
    chunks = [{**common, "choices": [{**choice, **part}]} for part in parts]
    wanted = (body.get("stream_options") or {}).get("include_usage")
    return [*chunks, *([{**common, "choices": [], "usage": usage}] if wanted else [])]


class AgentEnvironment:
    """An environment that runs a command, which asks the policy through an `Endpoint`. An observation is a JSON list of
    requests, each with what `Conversations.find` returns (after, new), tools, template and limit. A turn is a JSON list
    of replies to these: `refused`, or text, number, finish, and the tokens read and written.

    reward: scores the last reply of a command that tells no reward.
    """

    def __init__(self, command: str, reward: Callable[[str, str, str], float]) -> None:
        self._command, self._reward, self.blames = command, reward, ENVIRONMENT
        self._waiting: list[Request] = []
        self._over = False  # a request was beyond a limit of the episode

    def reset(self, sample: Mapping[str, Any]) -> None:
        self._sample, self._endpoint = sample, Endpoint()
        self._printed, row = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        about = {key: sample[key] for key in ("prompt_index", "sample")}
        row.write(json.dumps({**about, **sample["row"]}).encode() + b"\n")
        row.seek(0)
        url = f"http://127.0.0.1:{self._endpoint.server_port}/v1"
        variables = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": self._endpoint.token}
        process = subprocess.Popen(shlex.split(self._command), stdin=row, stdout=self._printed, env=variables)
        threading.Thread(target=lambda: self._endpoint.events.put(process.wait()), daemon=True).start()

    def step(self, turn: str) -> tuple[str | None, float, bool]:
        for request, reply in zip(self._waiting, json.loads(turn or "[]"), strict=True):
            self._over |= bool(reply.get("over"))
            self.blames = TEXT  # what a command does after a reply may be due to that
            request.reply = reply
            request.answered.set()
        events, told = self._endpoint.events, [self._endpoint.events.get()]
        while isinstance(told[-1], Request):
            try:
                told.append(events.get(timeout=ROUND))
            except queue.Empty:
                self._waiting = [each for each in told if isinstance(each, Request)]
                return json.dumps([each.asked for each in self._waiting]), 0.0, False
        return None, self._score(told[-1]), True  # whoever else has asked is gone, too

    def _score(self, code: int) -> float:
        """Return the reward of a command that has ended. Raises RuntimeError for one that failed."""
        end = self._endpoint
        if (code and not self._over) or self.blames == ENVIRONMENT:
            how = f"exited with code {code}" if code else "ended without a request"
            raise RuntimeError(f"the agent {how}{f'; the endpoint refused: {end.refused}' if end.refused else ''}")
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - TAIL))
        try:
            printed = reward_of(read_json(self._printed.read().strip().split(b"\n")[-1].decode("utf-8", "replace")))
        except ValueError:
            printed = None
        if (told := printed if printed is not None else end.posted) is not None:
            return told
        self.blames = REWARD_CODE
        return self._reward(self._sample["prompt"], end.last, self._sample["answer"])
