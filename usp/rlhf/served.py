"""Models that an OpenAI-compatible HTTP server has: teachers and references, and the policy of a rollout engine.

    token ids --POST URL/completions--> prompt_logprobs, the log-probability of each of them
    token ids --POST URL/completions, streamed--> the next token ids and their log-probabilities
    pieces of weights, or what changed in them --TCP--> `Worker`, which the server's processes load --vLLM's own
        loaders--> its parameters

It imports what a server's environment has: torch and numpy.
"""

from __future__ import annotations

import base64
import json
import math
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from usp.parallel import option
from usp.parallel.reallocation.delta import Delta, apply, delta_size, encode
from usp.parallel.tensor import add_low_rank

from .environments.ready_rewards import Server, post, posted
from .graph import Compute, DataflowGraph, Inference, Reduce
from .samples import Samples

_PROBE = "Zwölf Boxkämpfer jagen  42 + 8 = 50;\n\tfür (x) {日本}"  # a text that tokenizers write differently
_BYTES = 256  # of a token in a reply, at most
_LENGTH = struct.Struct(">I")  # of what describes a piece
WORKER = "usp.rlhf.served.Worker"  # for --worker-extension-cls
# What of a transformers configuration decides no number of a forward without dropout.
_IDLE = r"_.*|architectures|transformers_version|(torch_)?dtype|use_cache|id2label|label2id|problem_type|return_dict"
_IDLE += r"|output_.*|chunk_size_feed_forward|.*(dropout|pdrop|layerdrop|initializer|token_id|aux_loss|jitter).*"

M = TypeVar("M", bound="Model")


@dataclass(frozen=True)
class Model(Server):
    """The model of a server. url: of the API, such as http://127.0.0.1:8000/v1. workers: requests at a time."""

    name: str = ""
    timeout: float = 600.0
    workers: int = 32

    def named(self: M) -> M:
        """Return this model with the name that the server has for it. Raises ConnectionError without a server."""
        return replace(self, name=self.tried(lambda: post(f"{self.url}/models", None, 10)["data"][0]["id"]))

    def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of a text; None if the server does not tell."""
        body = {"model": self.name, "prompt": text, "add_special_tokens": False}
        with suppress(OSError, ValueError, LookupError, TypeError):
            return [int(token) for token in post(f"{self.url.removesuffix('/v1')}/tokenize", body, 10)["tokens"]]
        return None

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return the log-probability of each next token, at temperature 1, and 0 last. Raises ConnectionError."""
        return self.tried(lambda: self._logprobs(tokens.tolist()))

    def _logprobs(self, ids: list[int]) -> Tensor:
        body = {"model": self.name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        reply = post(f"{self.url}/completions", body, self.timeout, (64 + len(ids)) * _BYTES)
        rows = reply["choices"][0]["prompt_logprobs"]
        values = [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]
        if not all(map(math.isfinite, values)):
            raise ValueError("a log-probability is not finite")
        return torch.tensor([*values, 0.0])


@dataclass(frozen=True)
class ServedLogprobs:
    """Function of samples: the log-probabilities of the `tokens` in `mask` under `output`."""

    model: Model
    output: str

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        values: list[Tensor] = []
        if samples.ids:
            with ThreadPoolExecutor(self.model.workers) as pool:
                values = list(pool.map(self.model.logprobs, samples["tokens"]))
            values = [each.where(mask != 0, 0) for each, mask in zip(values, samples["mask"], strict=True)]
        return Samples(samples.ids, {self.output: values})


def with_served(graph: DataflowGraph, urls: Mapping[str, str], encode: Callable[[str], Any]) -> DataflowGraph:
    """Return the graph whose calls of the roles in `urls` ask the servers there.

    encode: of the policy's tokenizer.

    Raises ValueError for a role whose calls need more than log-probabilities at temperature 1, a server that does not
    reply, or one with another tokenizer.
    """
    for role, url in urls.items():
        calls, given = [call for call in graph.calls if call.role == role], option(role, url)
        works = [call.work for call in calls]
        if not calls or any(not isinstance(work, Inference) or work.head != "logprobs" for work in works):
            kinds = ", ".join(f"{call.name} ({call.kind})" for call in calls) or "no calls"
            raise ValueError(given + f": a server gives log-probabilities, and the role {role} has {kinds}")
        if different := {work.temperature for work in works if isinstance(work, Inference)} - {1.0}:
            temperature = f"at temperature 1, not {different.pop():g}"
            raise ValueError(given + f": a server's log-probabilities are {temperature}")
        try:
            model = Model(url.rstrip("/")).named()
        except ConnectionError as error:
            raise ValueError(given + f": {error}") from error
        if (ids := model.tokenize(_PROBE)) is not None and ids != list(map(int, encode(_PROBE))):
            other = f"{model.name} has another tokenizer than the policy"
            raise ValueError(given + f": {other}: its ids are other texts")
        asking = {
            call.name: replace(call, role="", work=Compute(ServedLogprobs(model, *call.outputs), scalars=()))
            for call in calls
        }
        graph = replace(graph, calls=tuple(asking.get(call.name, call) for call in graph.calls))
    return graph


class WeightPiece(NamedTuple):
    """The part of a tensor in files that a rank has. shape: in files. sizes, where: of the tensor as a box of its
    parameter, and the begin and end of the part in each of its dimensions. factors: of adapters, beside which values
    stay as they are: what `add_low_rank` adds to these, or nothing; None: without adapters."""

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    where: tuple[tuple[int, int], ...]
    values: Tensor
    factors: tuple[Tensor, ...] | None = None

    def whole(self) -> Tensor:
        """Return the tensor: nan where another rank has the values, so that whoever reads them there notices."""
        values = add_low_rank(self.values, self.factors) if self.factors else self.values
        if self.where == tuple((0, size) for size in self.sizes):
            return values.reshape(self.shape)
        whole = torch.full(self.sizes, math.nan, dtype=values.dtype, device=values.device)
        whole[tuple(slice(*ends) for ends in self.where)] = values
        return whole.reshape(self.shape)


Values: TypeAlias = dict[str, Tensor]  # of pieces, by name, as they were last given


def send_pieces(
    receivers: Mapping[str, tuple[socket.socket, bool]], pieces: Iterable[WeightPiece], given: Values | None = None
) -> tuple[int, dict[str, BaseException]]:
    """Send pieces, and their end, to all receivers; return the bytes of their values, and why receivers were lost.

    receivers: by name, a connection, and whether the receiver has what was sent before.
    given: what was sent before; of these pieces what has changed is sent to who has that. None: nobody keeps any.
    """
    faults, total, others = dict[str, BaseException](), 0, not all(knows for _, knows in receivers.values())

    def send(name: str, header: bytes, parts: Sequence[Tensor] = ()) -> int:
        data: list[Any] = [part.numpy() for part in parts]
        try:
            for each in (_LENGTH.pack(len(header)) + header, *data) if name not in faults else ():
                receivers[name][0].sendall(each)
        except OSError as error:
            faults[name] = error
            receivers[name][0].close()  # so that the other side ends, too
        return 0 if name in faults else sum(map(len, data))

    with ThreadPoolExecutor(len(receivers) or 1) as pool:
        for piece in pieces:
            # Copied, because the memory of what numpy has seen cannot be released.
            factors = [each.to("cpu", copy=True).contiguous() for each in piece.factors or ()]
            kinds, messages = [_kind(each) for each in factors], dict[bool, tuple[bytes, list[Tensor]]]()
            for knows, (changed, content) in _changes(piece, given, others).items():
                header = json.dumps([*piece[:4], _kind(piece.values)[0], changed, kinds]).encode()
                messages[knows] = header, [content, *(each.view(-1).view(torch.uint8) for each in factors)]
            own = [messages[knows] for _, knows in receivers.values()]
            total += sum(pool.map(send, receivers, *zip(*own, strict=True)))
        [*pool.map(send, receivers, [b""] * len(receivers))]
    return total, faults


def _changes(piece: WeightPiece, given: Values | None, others: bool) -> dict[bool, Delta]:
    """Return what is to be sent of a piece's values, by whether the receiver has those before, and count it as given.
    others: some have not."""
    known = None if given is None else given.get(piece.name)
    nothing = Delta(0, torch.empty(0, dtype=torch.uint8))
    if (stays := known is not None and piece.factors is not None) and not others:
        return {True: nothing}
    flat = piece.values.to("cpu", copy=given is not None).contiguous().view(-1)
    whole = Delta(len(flat), flat.view(torch.uint8))
    if given is not None:
        given[piece.name] = flat if piece.factors is None else flat.new_empty(0)
    return {False: whole, True: nothing if stays else whole if known is None else encode(flat, known)}


def _kind(x: Tensor) -> tuple[str, list[int]]:
    return str(x.dtype).removeprefix("torch."), [*x.shape]


def received_pieces(connection: socket.socket, given: Values | None = None) -> Iterator[WeightPiece]:
    """Yield what `send_pieces` sends, and keep it in `given` as that does. Raises ConnectionError where it ends
    early."""

    def read(size: int) -> Tensor:
        data, place = torch.empty(size, dtype=torch.uint8), 0
        buffer: Any = data.numpy()
        while place < size:
            if not (count := connection.recv_into(buffer[place:])):
                raise ConnectionError("the trainer closed the connection")
            place += count
        return data

    def of(dtype: str, shape: Sequence[int]) -> Tensor:
        kind = getattr(torch, dtype)
        return read(math.prod(shape) * kind.itemsize).view(kind).view(shape)

    while length := _LENGTH.unpack(bytes(read(_LENGTH.size).tolist()))[0]:
        name, shape, sizes, where, dtype, changed, kinds = json.loads(bytes(read(length).tolist()))
        kind, part = getattr(torch, dtype), [end - begin for begin, end in where]
        content = read(delta_size(math.prod(part), kind.itemsize, changed)[0])
        if given is not None and name in given:
            values = given[name]
            apply(Delta(changed, content), values, kind)
        else:
            values = content.view(kind).view(part)
            if given is not None:
                given[name] = values
        factors = [of(*each) for each in kinds]
        yield WeightPiece(name, tuple(shape), tuple(sizes), tuple(map(tuple, where)), values, tuple(factors))


def deciding(config: Any) -> dict[str, Any]:
    """Return what of a transformers configuration decides numbers, as JSON has it."""
    told = json.loads(json.dumps(config.to_dict(), default=str))
    return {key: value for key, value in told.items() if not re.fullmatch(_IDLE, key)}


def forget_kernels(model: torch.nn.Module) -> None:
    """Drop what kernels on CPUs hold of a vLLM model's weights in layouts of their own."""
    layer: Any
    for layer in model.modules():
        experts: Any = getattr(layer, "quant_method", None)
        if hasattr(experts, "moe_kernel"):
            experts.moe_kernel = None  # else it leaves the next experts as in files, which kernels do not read
        if hasattr(layer, "cpu_linear"):
            layer.cpu_linear = None


@contextmanager
def all_renewed(model: torch.nn.Module) -> Iterator[None]:
    """Let the block load all weights of a vLLM model: none survives that it leaves out, be it in a kernel's layout.

    vLLM keeps the old weights of a layer that is sent none. Here they are nan, which decoding notices, or on CPUs an
    error. A head that is the embedding is sent none, but has it: vLLM packs it only at the start, here every time.
    """
    weights = [*model.parameters()]
    if weights[0].device.type == "cpu":
        forget_kernels(model)
    for weight in weights:
        if weight.is_floating_point():
            weight.data.fill_(math.nan)
    yield
    layer: Any
    for name, layer in model.named_modules():
        if getattr(layer, "cpu_linear", layer) is None:
            layer.quant_method.process_weights_after_loading(layer)
            if layer.cpu_linear is None:
                raise ValueError(f"the update has no weights for the engine's {name}")


class Worker:
    """What `--worker-extension-cls` adds to each process of a vLLM server's model."""

    _usp_given: tuple[str, Values] = ("", {})  # the token of the last update of which it keeps the values, and these

    def usp_facts(self: Any) -> dict[str, Any]:
        """Return how the server was started, and what its model computes."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        computes, cache = deciding(model.hf_config), self.vllm_config.cache_config.cache_dtype
        if getattr(model, "word_embeddings_untied_by_checkpoint", False):  # vLLM's word for a head that files repeat
            computes["tie_word_embeddings"] = True
        return {
            "tp": parallel.tensor_parallel_size,
            "workers": parallel.world_size_across_dp,
            "experts": parallel.enable_expert_parallel,
            "dtype": str(model.dtype).removeprefix("torch."),
            "tokens": model.max_model_len,
            "logprobs": model.logprobs_mode,
            "defaults": model.generation_config,
            "routed": self.vllm_config.aux_output_config.enable_return_routed_experts,
            "quantization": model.quantization,
            "cache": "auto" if cache == str(model.dtype).removeprefix("torch.") else cache,
            "computes": computes,
        }

    def usp_receive(self: Any, addresses: Sequence[tuple[str, int]], token: str, after: str | None = None) -> None:
        """Replace all weights by those that a trainer sends from the address of this rank.

        token: tells it who asks. after: that of the update that only changes are sent to, "" before the first one, and
            the weights are kept in host memory for the next; None: they are not.
        """
        kept, given = self._usp_given if after else ("", {})
        self._usp_given = ("", {})  # until all has come
        if after and after != kept:
            raise ValueError("the weights that changes were sent to are not this server's last update")
        with socket.create_connection(tuple(addresses[self.rank]), 60) as connection:
            connection.settimeout(Model.timeout)
            connection.sendall(token.encode())
            pieces = received_pieces(connection, given if after is not None else None)
            weights = ((piece.name, piece.whole().to(self.device)) for piece in pieces)
            with all_renewed(self.model_runner.get_model()):
                self.reload_weights(weights_iterator=weights)
            for _ in weights:
                pass
        if after is not None:
            self._usp_given = (token, given)


@dataclass(frozen=True)
class RolloutServer(Model):
    """A vLLM server that decodes, started in its development mode with `Worker`."""

    @staticmethod
    def pool(urls: str, **options: Any) -> list[RolloutServer]:
        """Return the servers of URLs with commas between them, each once."""
        return [RolloutServer(url, **options) for url in dict.fromkeys(x.strip().rstrip("/") for x in urls.split(","))]

    def facts(self) -> dict[str, Any]:
        """Return what `Worker.usp_facts` does. Raises ConnectionError without a server, or one without `Worker`."""
        return self.tried(lambda: self._post("/collective_rpc", {"method": "usp_facts"})["results"][0])

    def version(self) -> str:
        """Return the version of the weights. Raises OSError or ValueError without one."""
        return str(self._post("/weight_info", None)["weight_version"])

    def stop(self) -> None:
        """Drop what the server decodes and has of its weights, until the end of `update`. Raises as `version`."""
        self._post("/pause?mode=abort&clear_cache=true", {})

    def update(self, addresses: Sequence[tuple[str, int]], token: str, version: str, after: str | None) -> None:
        """Let the workers of a server that was stopped receive weights, see `Worker.usp_receive`."""
        of_workers = {"addresses": addresses, "token": token, "after": after}
        self._post("/collective_rpc", {"method": "usp_receive", "kwargs": of_workers})
        self._post("/update_weight_version", {"new_version": version})
        self._post("/resume", {})

    def own_address(self) -> str:
        """Return this host's address as the server can reach it: that of the loopback for one on this host."""
        at = urlsplit(self.url)
        family, kind, *_, address = socket.getaddrinfo(at.hostname, at.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])

    def _post(self, path: str, body: Mapping[str, Any] | None) -> Any:
        return post(f"{self.url.removesuffix('/v1')}{path}", body, self.timeout)


class Written(NamedTuple):
    """Tokens of a request, with their log-probabilities. end: why there are no more; error: why there are none. routed:
    the experts that all tokens of the request but the last one chose, as `Rollout.routed`."""

    request: str
    tokens: list[tuple[int, float]]
    end: str | None = None
    error: str = ""
    routed: Tensor | None = None


def server_for(loads: Mapping[str, int], faults: Mapping[str, str], home: str) -> str:
    """Return the URL of the server that a request goes to: its home, or the one with the fewest requests.

    loads: requests by URL. faults: of the servers that are lost, of which the request goes to the first if all are.
    home: the URL of the requests before it in its episode, whose prefix it has; "" for the first one.
    """
    sound = [url for url in loads if url not in faults] or [next(iter(faults))]
    return home if home in sound else min(sound, key=loads.__getitem__)


class Requests:
    """Requests that a pool of servers answers as they write tokens. A server that fails is lost to all of them.

    servers: those with the fewest requests first in this order. slots: requests at a time. version: of the weights that
    all tokens are of. faults: why servers are lost, the oldest first. routed: they answer at the end of a request, and
    tell the experts, which they do not tell before.
    """

    def __init__(
        self, servers: Sequence[RolloutServer], slots: int, version: str, faults: Mapping[str, str], routed: bool
    ) -> None:
        self._servers, self._version, self._routed = {each.url: each for each in servers}, version, routed
        self._pool, self._lock, self.faults = ThreadPoolExecutor(slots), threading.Lock(), dict(faults)
        self._loads, self._homes = dict.fromkeys(self._servers, 0), dict[int, str]()
        self._open, self._written = set[str](), SimpleQueue[Written]()

    def begin(self, request: str, episode: int, prompt: Sequence[int], limit: int, sampling: Mapping[str, Any]) -> None:
        """Ask for `limit` tokens after a prompt."""
        self._open.add(request)
        self._pool.submit(self._ask, request, episode, list(prompt), limit, sampling)

    def step(self) -> Iterator[Written]:
        """Yield what has come, at least one. Raises ConnectionError for a request that failed, with retries."""
        written = self._written.get()
        while True:
            if written.error:
                raise ConnectionError(written.error)
            yield written
            try:
                written = self._written.get_nowait()
            except Empty:
                return

    def abort(self, requests: Iterable[str]) -> None:
        """Read no more of these requests: the server drops what loses its connection."""
        self._open.difference_update(requests)

    def close(self) -> None:
        self._open.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, request: str, episode: int, prompt: list[int], limit: int, sampling: Mapping[str, Any]) -> None:
        """Read a request to its end. One that breaks goes on as another, whose prompt has the tokens so far."""
        written, tries = list[int](), 0

        def read() -> None:
            body = {"model": server.name, "stream": not self._routed, **sampling}
            body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}  # no text
            body |= {"prompt": [*prompt, *written], "max_tokens": limit - len(written)}
            body |= {"seed": body["seed"] + len(written)}
            for told in self._stream(server, body, request):
                if request not in self._open:
                    return
                if told.end not in (None, "stop", "length"):
                    raise ConnectionError(f"it ended a response early, for the reason {told.end}")
                written.extend(token for token, _ in told.tokens)
                self._written.put(told)
                if told.end is not None:
                    self._open.discard(request)
                    return
            if request in self._open:
                raise ConnectionError("the reply ended early")

        while request in self._open:
            with self._lock:
                url = self._homes[episode] = server_for(self._loads, self.faults, self._homes.get(episode, ""))
                server, lost = self._servers[url], url in self.faults
                if tries == (1 + server.retries) * len(self._servers):
                    self._written.put(Written(request, [], error="; ".join(self.faults.values())))
                    return
                self._loads[url] += 1
            if lost:  # as all are
                time.sleep(server.pause * 2 ** (tries // len(self._servers) - 1))
            error, tries = "", tries + 1
            try:
                replace(server, retries=0).tried(read)
            except ConnectionError as failed:
                error = f"{failed}"
            with self._lock:
                self._loads[url] -= 1
                self.faults.pop(url, None)
                self.faults |= {url: error} if error else {}

    def _stream(self, server: RolloutServer, body: Mapping[str, Any], request: str) -> Iterator[Written]:
        with posted(f"{server.url}/completions", body, server.timeout) as reply:
            # Of a server that answers only the first update after its start changes this.
            if (version := server.version()) != self._version:
                why = "which this run gave it: it was started again, or another run updates it"
                raise ConnectionError(f"its weights are of version {version} and not {self._version}, {why}")
            for line in reply:
                if not line.startswith((b"data: {", b"{")):
                    continue
                told = json.loads(line.removeprefix(b"data: "))
                if "choices" not in told:
                    raise ValueError(f"{told}"[:1000])
                for choice in told["choices"]:
                    logprobs = [math.nan if each is None else each for each in choice["logprobs"]["token_logprobs"]]
                    tokens = list(zip(choice["token_ids"], logprobs, strict=True))
                    routed = None
                    if self._routed:  # a file of numpy's, (tokens, layers, experts per token)
                        experts = np.load(BytesIO(base64.b64decode(choice["routed_experts"])))
                        routed = torch.from_numpy(experts.astype(np.int16)).flatten(1) + 1
                    yield Written(request, tokens, choice.get("finish_reason"), routed=routed)
