"""A server of the Model Context Protocol, for tests: adds numbers, and fails in several ways."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
HOW = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}


def reply(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {}}
    if method == "tools/list":  # in two pages
        if "cursor" in params:
            return {"tools": [{"name": "fail", "inputSchema": HOW}]}
        return {"tools": [{"name": "add", "description": "Add.", "inputSchema": NUMBERS}], "nextCursor": "2"}
    arguments = params["arguments"]
    if params["name"] == "add":
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    if arguments["how"] == "die":
        os._exit(1)
    if arguments["how"] == "hang":
        time.sleep(60)
    return {"content": [{"type": "text", "text": "it is broken"}], "isError": True}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}), flush=True)
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["params"].get("name") == "nothing":
        answer["error"] = {"code": -32602, "message": "no such tool"}
    else:
        answer["result"] = reply(asked["method"], asked["params"])
    print(json.dumps(answer), flush=True)
