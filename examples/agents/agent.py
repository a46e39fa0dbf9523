"""An agent that knows only the client of an OpenAI-compatible server: rlhf.py trains its model.

Its model works at a terminal, which takes a character at a time. A letter runs a tool, and its result is what the model
reads next. The reward is the share of its turns that ran one: a sixth of all tokens are letters."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI

TURNS = 2


def tool(command: str) -> str:
    """Return what the tool prints; empty for what is no command."""
    return f"{command}: done" if len(command) == 1 and "@" <= command <= "\x7f" else ""


def play(client: OpenAI, question: str) -> float:
    """Return the reward of an episode."""
    messages: list = [{"role": "user", "content": question}]
    ran = 0
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        printed = tool(reply.content or "")
        ran += bool(printed)
        messages += [reply, {"role": "user", "content": printed or "?"}]
    return ran / TURNS


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # the episodes of a step come at once


class Service(BaseHTTPRequestHandler):
    """Plays the episodes of a run in one process: --agent http://127.0.0.1:PORT."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        client = OpenAI(base_url=asked["OPENAI_BASE_URL"], api_key=asked["OPENAI_API_KEY"])
        reward = play(client, asked["row"]["prompt"][0]["content"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"reward": reward}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


if __name__ == "__main__":
    if sys.argv[1:]:
        Server(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
    row = json.loads(sys.stdin.readline())
    print(json.dumps({"reward": play(OpenAI(), row["prompt"][0]["content"])}))
