"""A server of the Model Context Protocol, for tests: it replies to a call with the texts in its arguments, in which
"ID" becomes the number of the request."""

from __future__ import annotations

import json
import sys

asked_in = 0

for line in sys.stdin:
    asked = json.loads(line)
    arguments = asked.get("params", {}).get("arguments")
    if arguments is not None:
        asked_in = asked["id"]
        for text in arguments["texts"]:
            sys.stdout.write(text.replace('"ID"', str(asked["id"])).encode("utf-8", "replace").decode())
        sys.stdout.flush()
    elif asked.get("method") in ("initialize", "tools/list"):
        tools = [{"name": "echo", "inputSchema": {"properties": {"texts": {"type": "array"}}}}]
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"tools": tools}}), flush=True)
    elif "id" in asked and asked["id"] == "of the server":  # the client's reply
        content = [{"type": "text", "text": json.dumps(asked, sort_keys=True)}]
        print(json.dumps({"id": asked_in, "result": {"content": content}}), flush=True)
