"""The calls of tools in a policy's turn, in the formats of model families. The standard library alone is imported.

    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                                          Hermes, Qwen
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>                   Qwen3-Coder
    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>                               GLM
    <|python_tag|>{"name": NAME, "parameters": {...}}; {...}    or a turn of such objects only              Llama 3
    [TOOL_CALLS][{"name": NAME, "arguments": {...}, "id": ID}]    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}    Mistral
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>    or, before 3.1, in a block of JSON      DeepSeek
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>                       gpt-oss

The turn itself says which: markers are special tokens, or text that nobody else writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .outside import clean, cleaned, read_json

_NAME = r"(?P<name>[^\s<>\[\]{}]{1,200})"
_END = r"(?:<\|eom_id\|>|<\|eot_id\|>|\Z)"
FORMATS = {
    "<tool_call>": r"<tool_call>(?P<body>.*?)(?:</tool_call>|\Z)",  # the last may lack its end
    "<｜tool▁call▁begin｜>": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    rf"(?:{_NAME}\s*(?:<｜tool▁sep｜>|```json))?(?P<body>.*?)(?:<｜tool▁call▁end｜>|\Z)",
    "[TOOL_CALLS]": rf"\[TOOL_CALLS\](?:{_NAME}(?:\[CALL_ID\](?P<id>\w{{1,64}}))?(?:\[ARGS\]|(?={{)))?"
    r"(?P<body>.*?)(?=\[TOOL_CALLS\]|</s>|\Z)",
    " to=functions.": rf" to=functions\.{_NAME}(?=[\s<])[^{{]{{0,100}}?<\|message\|>"
    r"(?P<body>.*?)(?:<\|call\|>|<\|end\|>|\Z)",
    "<|python_tag|>": rf"<\|python_tag\|>(?P<body>.*?){_END}",
}
_LLAMA = re.compile(rf'\s*(?P<body>\{{\s*"name"\s*:\s*"[^"]{{1,200}}"\s*,\s*"parameters"\s*:.*?){_END}', re.DOTALL)
_PAIRS = {
    "<function=": r"<parameter=(.{1,200}?)>\n?(.*?)(?:\n?</parameter>|\Z)",
    "<arg_key>": r"<arg_key>(.{1,200}?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)",
}
_WORDS = {"true": True, "false": False, "none": None, "null": None}
Schemas = Sequence[Mapping[str, Any]]  # of functions, as chat templates describe them


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


def calls_of(turn: str, schemas: Schemas = ()) -> list[ToolCall | str]:
    """Return the calls in a turn, or of each that is malformed what is wrong with it.

    schemas: say which arguments are not text, in formats that do not.
    """
    calls: list[ToolCall | str] = []
    _, marker = min(((at, marker) for marker in FORMATS if (at := turn.find(marker)) >= 0), default=(0, ""))
    found = re.finditer(FORMATS[marker], turn, re.DOTALL) if marker else filter(None, [_LLAMA.match(turn)])
    for match in found:
        parts = match.groupdict()
        try:
            calls += _read(parts["body"].strip(), parts.get("name") or "", parts.get("id") or "", schemas)
        except (ValueError, RecursionError) as error:
            calls.append(f"the call is not JSON: {error}"[:500])
    return calls


def before_calls(turn: str) -> str:
    """Return what a turn with calls says before the first, without special tokens."""
    before = turn[: min((at for marker in FORMATS if (at := turn.find(marker)) >= 0), default=0)]
    return re.sub(r"<\|(?:channel|start)\|>\w+|<[|｜][^<>]{1,64}[|｜]>", "", before).strip()


def _read(body: str, name: str, number: str, schemas: Schemas) -> Iterator[ToolCall | str]:
    begin = "<function=" if body.startswith("<function=") else "<arg_key>" if "<arg_key>" in body else ""
    if not (name or body.startswith(("{", "["))) and (begin or re.fullmatch(r"[\w.-]{1,200}", body)):
        head = re.search(r"<function=([^<>]{1,200})>", body) if begin == "<function=" else re.match("[^<]*", body)
        called = head[head.lastindex or 0].strip() if head else ""
        pairs = re.findall(_PAIRS[begin], body, re.DOTALL) if begin else ()
        yield ToolCall(called, {key.strip(): _value(text, called, key.strip(), schemas) for key, text in pairs})
        return
    text, at = body.removesuffix("```").rstrip(), 0
    while at < len(text) or not at:
        value, at = json.JSONDecoder(strict=False).raw_decode(text, at)
        at = re.compile(r"[;\s]*").match(text, at).end()  # type: ignore[union-attr]  # it may be empty
        for each in value if isinstance(value, list) and not name else [value]:
            whole = {"name": name, "arguments": each, "id": number} if name else each if isinstance(each, dict) else {}
            arguments = whole.get("arguments", whole.get("parameters", {}))
            arguments = read_json(arguments or "{}") if isinstance(arguments, str) else cleaned(arguments)
            if not isinstance(arguments, dict) or not isinstance(whole.get("name"), str):
                yield 'a call must be {"name": ..., "arguments": {...}}'
            else:
                yield ToolCall(clean(whole["name"]), arguments, clean(str(whole.get("id") or "")))


def _value(text: str, name: str, key: str, schemas: Schemas) -> Any:
    """Return an argument that is written as text: JSON if the schema of the function has another type."""
    for schema in schemas:
        try:
            function = schema["function"]
            kind = function["parameters"]["properties"][key].get("type", "string") if function["name"] == name else ""
            if kind and kind != "string":
                return _WORDS[text.lower()] if text.lower() in _WORDS else read_json(text)
        except (LookupError, TypeError, AttributeError, ValueError):
            continue
    return text
