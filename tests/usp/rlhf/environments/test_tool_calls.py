"""Calls that the templates of model families write are read as they were made; broken ones are answered."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from usp.rlhf.environments.agents import message_of
from usp.rlhf.environments.episodes import Episodes, Processes
from usp.rlhf.environments.tool_calls import ToolCall, calls_of
from usp.rlhf.environments.tools import Toolbox, ToolEnvironment

EACH = "{%- for message in messages %}{%- if message.role == 'assistant' %}{{- message.content }}"
CALLS = "{%- for call in message.tool_calls %}{%- set f = call.function %}"
END = "{%- endfor %}{%- endif %}{%- endfor %}"
# Each writes the calls of a message as the family's published template does.
TEMPLATES = {
    "hermes": EACH
    + CALLS
    + '{{- "\\n<tool_call>\\n" + ({"name": f.name, "arguments": f.arguments} | tojson) + "\\n</tool_call>" }}'
    + END,
    "hermes, arguments as text": EACH
    + CALLS
    + '{{- "<tool_call>" + ({"arguments": f.arguments | tojson, "name": f.name} | tojson) + "</tool_call>" }}'
    + END,
    "qwen3-coder": EACH
    + CALLS
    + '{{- "\\n<tool_call>\\n<function=" + f.name + ">\\n" }}{%- for k, v in f.arguments.items() %}'
    + '{{- "<parameter=" + k + ">\\n" }}{{- v | tojson if v is mapping or (v is sequence and v is not string) else'
    + ' v | string }}{{- "\\n</parameter>\\n" }}{%- endfor %}{{- "</function>\\n</tool_call>" }}'
    + END,
    "glm": EACH
    + CALLS
    + '{{- "\\n<tool_call>" + f.name }}{%- for k, v in f.arguments.items() %}{{- "\\n<arg_key>" + k + "</arg_key>\\n'
    + '<arg_value>" }}{{- v if v is string else v | tojson }}{{- "</arg_value>" }}{%- endfor %}{{- "\\n</tool_call>" }}'
    + END,
    "llama3": EACH
    + '{{- "<|python_tag|>" if message.content }}'
    + CALLS
    + '{{- {"name": f.name, "parameters": f.arguments} | tojson }}{{- "; " if not loop.last }}{%- endfor %}'
    + '{{- "<|eom_id|>" }}{%- endif %}{%- endfor %}',
    "mistral 3": EACH
    + '{{- "[TOOL_CALLS] [" }}'
    + CALLS
    + '{{- {"name": f.name, "arguments": f.arguments, "id": call.id} | tojson }}{{- ", " if not loop.last }}'
    + '{%- endfor %}{{- "]</s>" }}{%- endif %}{%- endfor %}',
    "mistral 11": EACH
    + CALLS
    + '{{- "[TOOL_CALLS]" + f.name + "[CALL_ID]" + call.id + "[ARGS]" + (f.arguments | tojson) }}{%- endfor %}'
    + '{{- "</s>" }}{%- endif %}{%- endfor %}',
    "deepseek 3": EACH
    + '{{- "<｜tool▁calls▁begin｜>" }}'
    + CALLS
    + '{{- "<｜tool▁call▁begin｜>" + call.type + "<｜tool▁sep｜>" + f.name + "\\n```json\\n" + (f.arguments | tojson)'
    + ' + "\\n```<｜tool▁call▁end｜>" }}{{- "\\n" if not loop.last }}{%- endfor %}'
    + '{{- "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" }}{%- endif %}{%- endfor %}',
    "deepseek 3.1": EACH
    + '{{- "<｜tool▁calls▁begin｜>" }}'
    + CALLS
    + '{{- "<｜tool▁call▁begin｜>" + f.name + "<｜tool▁sep｜>" + (f.arguments | tojson) + "<｜tool▁call▁end｜>" }}'
    + '{%- endfor %}{{- "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" }}{%- endif %}{%- endfor %}',
    "gpt-oss": "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    + '{{- "<|channel|>commentary<|message|>" + message.content + "<|end|>" if message.content }}'
    + CALLS
    + '{{- "<|start|>assistant" if message.content or not loop.first }}{{- "<|channel|>commentary to=functions." +'
    + ' f.name + " <|constrain|>json<|message|>" + (f.arguments | tojson) + "<|call|>" }}'
    + END,
}
BY_TEXT = ("qwen3-coder", "glm")  # arguments that are not text are written like those that are
PIECES = [*"abz09 .,_-+*/\\\"'`{}[]()<>|;:=#?é▁｜\n\t", "```", "</", "```json", "null", "🙂", "<function=x>", "\n\n"]
KINDS: dict[str, Any] = {
    "string": lambda draw: text(draw),
    "integer": lambda draw: draw.randint(-9, 10**6),
    "number": lambda draw: draw.choice([0.5, -2.25, 1e-3, 3]),
    "boolean": lambda draw: draw.random() < 0.5,
    "null": lambda draw: None,
    "array": lambda draw: [text(draw), draw.randint(0, 9), [True, None]],
    "object": lambda draw: {word(draw): text(draw), "deep": {"er": [1, {}]}},
}


def text(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(0, 20)))


def word(draw: random.Random) -> str:
    return draw.choice("abcfgx") + "".join(draw.choices("abc_0-", k=draw.randint(0, 6)))


def made(draw: random.Random) -> tuple[ToolCall, dict[str, Any]]:
    """Return a call, and the schema of its function."""
    kinds = {word(draw): draw.choice([*KINDS]) for _ in range(draw.randint(0, 4))}
    name, arguments = word(draw), {key: KINDS[kind](draw) for key, kind in kinds.items()}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return ToolCall(name, arguments, "".join(draw.choices("aZ09", k=9))), {"type": "function", "function": schema}


def rendered(family: str, content: str, calls: list[ToolCall]) -> str:
    listed = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    message = {"role": "assistant", "content": content, "tool_calls": listed}
    texts, _ = render_jinja_template([[message]], None, chat_template=TEMPLATES[family])
    return str(texts[0])


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_template_writes_is_read(family: str) -> None:
    """200 calls, up to three in a turn; also as the endpoint tells them, with arguments as the text of JSON."""
    draw, number = random.Random(family), 0
    while number < 200:
        made_ = {call.name: (call, schema) for call, schema in (made(draw) for _ in range(draw.randint(1, 3)))}
        calls, schemas = [call for call, _ in made_.values()], [schema for _, schema in made_.values()]
        content = draw.choice(["", "Let me see: {1} [2]."])
        turn = rendered(family, content, calls)
        found = calls_of(turn, schemas)
        assert [each[:2] for each in found] == [call[:2] for call in calls], turn
        assert not family.startswith("mistral") or found == calls  # with their ids
        message = message_of(turn, schemas)
        functions = [each["function"] for each in message["tool_calls"]]
        assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [call[:2] for call in calls]
        assert (message["content"] or "") == content
        number += len(calls)


@pytest.mark.parametrize("family", TEMPLATES)
def test_broken_calls_are_answered(family: str) -> None:
    draw = random.Random(family)
    environment = ToolEnvironment(Toolbox(["calculator"]), lambda prompt, response, answer: 0.0, chat=True)
    environment.reset({"prompt": "", "answer": ""})
    for _ in range(20):
        turn = rendered(family, "", [ToolCall("calculator", {"expression": "1 + 1"}, "a12345678"), made(draw)[0]])
        places = sorted(draw.sample(range(len(turn)), 2))
        for broken in (turn[: places[0]], turn[places[0] :], turn[: places[0]] + turn[places[1] :], turn * 9):
            observation, _, done = environment.step(broken)
            assert done == (observation is None) and not isinstance(observation, str)
            assert all(
                each["role"] == "tool" and each["content"] and each["tool_call_id"] for each in observation or ()
            )
    good = rendered(family, "", [ToolCall("calculator", {"expression": "6 * 7"}, "a12345678")])
    answers, _, done = environment.step(good)
    names = {"role": "tool", "name": "calculator", "content": "42"}
    id_ = "a12345678" if family.startswith("mistral") else "call00000"
    assert answers == [{**names, "tool_call_id": id_}] and not done
    unfinished = good[: good.rindex("7") + 1]
    answers, _, done = environment.step(unfinished)
    said = answers[0]["content"] if answers else ""  # type: ignore[index]
    assert not done and said == ("42" if family in BY_TEXT else said) and (family in BY_TEXT or "not JSON" in said)


def test_which_format_a_turn_has() -> None:
    assert calls_of('{"name": "f", "parameters": {"x": "1"}}') == [ToolCall("f", {"x": "1"})]  # Llama 3, alone
    for answer in ('The call was {"name": "f", "parameters": {}}', '{"name": "f", "age": 3}', '[{"name": "f"}]'):
        assert calls_of(answer) == []
    nested = json.dumps([{"name": "f", "arguments": {"x": "<tool_call> to=functions.g<|message|>"}}])
    assert calls_of(f"[TOOL_CALLS]{nested}") == [ToolCall("f", {"x": "<tool_call> to=functions.g<|message|>"})]
    assert calls_of("<tool_call>f</tool_call>") == [ToolCall("f", {})]  # GLM, without arguments
    assert calls_of('[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}</s>') == [ToolCall("f", {"x": 1}), ToolCall("g", {})]
    assert calls_of('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>') == [
        ToolCall("f", {"x": 1})
    ]
    texts = "<tool_call>f<arg_key>a</arg_key><arg_value>7</arg_value><arg_key>b</arg_key><arg_value>7</arg_value>"
    schema = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    assert calls_of(texts, [{"function": []}, schema]) == [ToolCall("f", {"a": 7, "b": "7"})]


def test_special_tokens_reach_the_environment_only_where_they_mark_calls() -> None:
    special = "<|python_tag|>"
    episodes = Episodes(
        Processes("none.py:None"),
        [],
        lambda ids: "".join(map(chr, ids)),
        lambda *_: [],
        show=lambda ids: special * (ids[0] == ord("{")) + "".join(map(chr, ids)) + "<|eot_id|>",
    )
    for turn, read in {
        "42": "42",
        '<tool_call>{"name": "f"}</tool_call>': '<tool_call>{"name": "f"}</tool_call>',
        '{"name": "f"}': special + '{"name": "f"}<|eot_id|>',
    }.items():
        shown = [*map(ord, turn)]
        assert episodes.written(shown) == read
