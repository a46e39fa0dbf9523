"""vLLM as the engine of a generate call, in the processes of the run, or as a server elsewhere.

    trained layout --reallocation, a layer at a time--> this rank's shards --vLLM's own loaders--> its fused parameters
    token ids --continuous batching of vLLM--> token ids and log-probabilities

Every rank of a tensor-parallel group has an engine that computes its part, as with vLLM's external launcher, and all of
them schedule the same sequences. vLLM keeps its process groups in globals, so a process has one engine at most. It is
imported where an engine starts, and nowhere else.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from mmap import MADV_DONTNEED, PAGESIZE
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from usp.hf.disk import DiskTensor
from usp.hf.models import ModelConfig
from usp.parallel import ParallelMesh, format_ranks
from usp.parallel.groups import gather_objects
from usp.parallel.reallocation.boxes import Box
from usp.rlhf.environments.sandbox import call
from usp.rlhf.graph import Generate
from usp.rlhf.samples import derived_seed
from usp.rlhf.served import (
    Requests,
    RolloutServer,
    Values,
    WeightPiece,
    Written,
    all_renewed,
    deciding,
    forget_kernels,
    send_pieces,
)
from usp.run.output import warn

from .decoding import Decode, GeneratedResponse, Rollout, Stops
from .turns import Turns

LEAST_TEMPERATURE = 0.01  # vLLM samples below it as at it
_VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to it, and divides the padded one
T = TypeVar("T")
Enough: TypeAlias = Callable[[int], bool]  # see `Generator.generate`
Naming: TypeAlias = Callable[[str], AbstractContextManager[Any]]  # see `Watchdog.naming`


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, the same on all of its ranks."""

    calls: str  # that it decodes for, to be named in errors
    tp: int  # consecutive ranks that share a model
    experts: bool  # these ranks divide the experts, instead of each expert
    dtype: torch.dtype
    tokens: int  # of the longest sequence
    slots: int  # most sequences that are decoded at a time
    cache_bytes: int  # of the KV cache on a rank
    processed: bool  # log-probabilities are those of the sampled distribution, without cuts; else at temperature 1
    changes: bool = False  # a server is sent only what has changed, after the first update
    routed: bool = False  # a server tells which experts tokens chose

    @property
    def logprobs_mode(self) -> str:
        """The name that vLLM has for it."""
        return "processed_logprobs" if self.processed else "raw_logprobs"


def cuts(works: Iterable[Generate]) -> bool:
    """Return whether a generate call samples with top-k or top-p, which the log-probabilities are those before."""
    return any(work.top_k or work.top_p < 1 for work in works)


def sampling_problems(works: Iterable[Generate], served: bool = False) -> list[str]:
    """Return why vLLM cannot sample as generate calls ask, of which it returns log-probabilities of one kind."""
    problems, works = [], list(works)
    if not served and not find_spec("vllm"):
        problems.append("the package vllm is not installed: pip install it, or use another engine")
    temperatures = sorted({work.temperature for work in works})
    if cut := cuts(works):
        temperatures = [each for each in temperatures if each not in (0, 1)]
    elif problem := [each for each in temperatures if 0 < each < LEAST_TEMPERATURE]:
        problems.append(f"temperature={problem[0]} is below vLLM's least, {LEAST_TEMPERATURE}: use 0 or more than that")
    if cut and temperatures:
        problems.append(
            f"with top_k or top_p vLLM returns log-probabilities at temperature 1 or after the cut, and training needs "
            f"those at temperature={temperatures[0]} before it: use temperature 1 or 0, or neither top_k nor top_p"
        )
    return problems


def most_drift(dtype: torch.dtype, temperature: float) -> float:
    """Return the mean |log-probability of an engine - that in training| over a step's tokens that rounding explains.

    64 units of the dtype. A model of 32 layers with random weights, and logits with a standard deviation of 5, differs
    by 30 to 38 of them between two kernels of attention, and that grows as the root of the depth. GPUs may multiply
    float32 as TF32, whose unit is 2**-10. Below temperature 1 log-probabilities and their errors are larger.
    """
    return 64 * max(torch.finfo(dtype).eps, 2**-10) / min(1.0, temperature or 1.0)


def whole_vocabulary(rows: int, tp: int) -> bool:
    """Return whether vLLM's ranks hold other rows of the embedding and the head than an even division gives them."""
    return tp > 1 and rows % _VOCABULARY_MULTIPLE > 0


class VllmEngine:
    """An engine of this rank. Collective over its tensor-parallel group, unless said otherwise.

    It has memory and weights only between `wake` and `sleep`.

    receives: whether `load` takes weights on this rank.
    """

    receives = True

    def __init__(self, engine: Any, options: EngineOptions, mesh: ParallelMesh, decode: Decode, naming: Naming) -> None:
        self._engine, self._options, self._mesh, self._decode, self._naming = engine, options, mesh, decode, naming
        self._asleep = False
        self._together = {"tp": mesh.group("tp")} if options.tp > 1 else {}  # ranks that decode the same

    @staticmethod
    def start(
        config: ModelConfig, options: EngineOptions, mesh: ParallelMesh, decode: Decode, naming: Naming
    ) -> VllmEngine | None:
        """Start the engine of this rank; None on ranks outside of `mesh`. Collective over the world, as vLLM's process
        groups are.

        It sets, for this process: VLLM_ENABLE_V1_MULTIPROCESSING=0, so that ranks decode in step; VLLM_NO_USAGE_STATS=1
        and HF_HUB_OFFLINE=1, so that nothing is sent or fetched; VLLM_LOGGING_LEVEL=WARNING.

        Raises ValueError on all ranks for a model that vLLM does not know or cannot divide so, or too small a cache.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        from vllm import EngineArgs  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.v1.engine.llm_engine import LLMEngine

        job = [secrets.token_hex(8)]
        dist.broadcast_object_list(job, src=0)
        threads, sets_threads = torch.get_num_threads(), torch.set_num_threads
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            config.save_pretrained(folder)  # without weights
            try:
                arguments = EngineArgs(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype=options.dtype,
                    enforce_eager=mesh.device_type == "cpu",
                    tensor_parallel_size=options.tp,
                    enable_expert_parallel=options.experts,
                    distributed_executor_backend=_executor(job[0]),
                    kv_cache_memory_bytes=options.cache_bytes,
                    max_model_len=options.tokens,
                    block_size=32 if mesh.device_type == "cpu" else None,  # not 128: equal prompts share whole blocks
                    max_num_seqs=options.slots,
                    logprobs_mode=options.logprobs_mode,
                    generation_config="vllm",  # no defaults of sampling from files
                    enable_sleep_mode=mesh.device_type != "cpu",
                )
                vllm_config = arguments.create_engine_config()
                if vllm_config.model_config.using_transformers_backend():
                    raise ValueError("it decodes it by transformers' own class and changes that: use a vLLM server")
            except ValueError as error:
                raise ValueError(f"vLLM does not decode {config.model_type} in the run: {error}") from error
            engine, problem = None, ""
            try:
                if mesh.member:
                    engine = VllmEngine(LLMEngine.from_vllm_config(vllm_config), options, mesh, decode, naming)
                else:
                    _join(vllm_config, job[0])
            except ValueError as error:  # which all ranks of the engine have
                problem = _refusal(f"{error}", options)
        torch.set_num_threads = sets_threads  # vLLM replaces it on CPUs
        torch.set_num_threads(threads)
        problems = gather_objects(problem)  # all have opened the shared memory of their group, which stays theirs
        for file in Path("/dev/shm").glob(f"{job[0]}-*"):
            file.unlink(missing_ok=True)
        if problem := next(filter(None, problems), ""):
            raise ValueError(problem)
        return engine

    def load(self, pieces: Iterator[WeightPiece]) -> int:
        """Replace all weights by those that `pieces` yields, this rank's parts. All of them are consumed. Returns the
        bytes that left the run for it."""
        weights = ((piece.name, piece.whole()) for piece in pieces)
        with self._named("while its weights were updated"), all_renewed(self._model()):
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        for _ in weights:
            pass
        self._engine.reset_prefix_cache()
        return 0

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor],
        work: Generate,
        seeds: Sequence[int],
        samples: Sequence[tuple[int, int]] = (),
        *,
        begun: Sequence[GeneratedResponse] | None = None,
        enough: Enough | None = None,
    ) -> list[GeneratedResponse]:
        """Return one response per prompt, the same on every rank of the group. Tokens depend on the seed, the weights
        and where a response stopped and went on, but are other ones than `Generator`'s, unless the temperature is 0.

        Raises:
            ValueError: naming every prompt that is too long.
            RanksDisagree: if ranks decoded different tokens.
            RuntimeError: if the engine fails, or the model's logits are not finite.
        """
        longest = self._options.tokens
        if long := [f"prompt {i} has {len(each)} tokens" for i, each in enumerate(prompts) if len(each) >= longest]:
            raise ValueError(f"{', '.join(long)}, expected 1 to {longest - 1}, which the engine was started for")
        episodes = work.episodes
        rollouts = Rollout.begin(prompts, work, seeds, None if episodes else begun, longest)
        leads = self._mesh.rank("tp") == 0
        turns = None
        if episodes:
            others: dict[str, Any] = {"leads": leads, "context": longest, "agents": self._options.slots}
            turns = Turns(rollouts, episodes, samples, self._together, begun, enough, **others)
        with closing(turns) if turns else nullcontext(), self._named("while it decoded"):
            self._decode_all(rollouts, work, turns, None if turns else enough)
        routed = methodcaller("choices", work.routed)
        found = turns.responses(routed) if turns else [each.response(routed(each)) for each in rollouts]
        for number, response in enumerate(found):
            if not bool(response.logprobs.isfinite().all()):
                why = f"its weights or its activations in {self._options.dtype} are, or it took weights of other ranks"
                raise RuntimeError(f"vLLM's logits of response {number} are not finite: {why}")
        if self._together:
            self._mesh.agree([each.tokens.tolist() for each in found], "the tokens that vLLM decoded", ("tp",))
        return found

    def _decode_all(
        self, rollouts: Sequence[Rollout], work: Generate, turns: Turns | None, enough: Enough | None
    ) -> None:
        """Decode the rollouts, and those that follow their turns, until they end or are `enough`."""
        ended, requests = Stops(work, self._decode), count()
        active, leaves = dict[str, Rollout](), False  # active: by request

        def begin(rollout: Rollout) -> None:
            before, request = rollout.before + rollout.known, str(next(requests))
            sampling = {
                "temperature": work.temperature,
                "top_k": work.top_k,
                "top_p": work.top_p,
                "seed": derived_seed(rollout.seed, before) if before else rollout.seed,  # whose noise begins here
                "stop_token_ids": list(work.stop_ids),
                "ignore_eos": True,  # stop ids say where responses end
                "logprobs": 0,  # those of the tokens alone
            }
            active[request] = rollout
            self._begin(request, rollout, sampling)

        for rollout in turns.first if turns else rollouts:
            begin(rollout)
        while not leaves and (active or (turns is not None and turns.waiting)):
            for rollout in turns.go_on(wait=not active) if turns is not None and turns.waiting else ():
                begin(rollout)
            leaves = turns is not None and turns.ended
            for written in self._step() if active else ():
                if (told := active.get(written.request)) is None:
                    continue  # its stop string is complete
                if any(told.take(token, logprob, ended) for token, logprob in written.tokens):
                    del active[written.request]
                    if written.routed is not None:  # of all that the server decoded
                        read = torch.arange(len(told.prompt) + len(told.tokens) - 1)
                        told.routed.append((read, written.routed[: len(read)]))
                    if written.end is None:
                        self._abort([written.request])
                    if turns is not None:
                        turns.end_turn(told)
                    leaves |= enough is not None and enough(told.number)
                elif written.end is not None:
                    raise RuntimeError(f"it ended a response early, for the reason {written.end}")
        self._abort(list(active))

    def _begin(self, request: str, rollout: Rollout, sampling: Mapping[str, Any]) -> None:
        """Ask for the tokens of a rollout."""
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind

        options = {"detokenize": False, "output_kind": RequestOutputKind.DELTA}
        options["max_tokens"] = rollout.limit - rollout.known
        self._engine.add_request(request, {"prompt_token_ids": rollout.given}, SamplingParams(**sampling, **options))

    def _step(self) -> Iterable[Written]:
        """Return the tokens that come next, of some requests."""
        for output in self._engine.step():
            (newest,) = output.outputs
            tokens = [(token, row[token].logprob) for token, row in zip(newest.token_ids, newest.logprobs, strict=True)]
            yield Written(output.request_id, tokens, newest.finish_reason if output.finished else None)

    def _abort(self, requests: Sequence[str]) -> None:
        self._engine.abort_request(requests)

    def sleep(self) -> None:
        """Free the memory of weights and KV cache, and lose both. Local. Does nothing if asleep."""
        if self._asleep:
            return
        self._asleep = True
        if self._mesh.device_type != "cpu":
            self._engine.sleep(level=2)
            return
        # Pages go back to the system. Addresses stay, and read as zeros: attention reads beyond the end of a sequence,
        # where a nan is not hidden by its weight of 0.
        for storage in self._storages():
            begin, end = -(-storage.data_ptr() // PAGESIZE), (storage.data_ptr() + storage.nbytes()) // PAGESIZE
            if begin < end:
                call("madvise", begin * PAGESIZE, (end - begin) * PAGESIZE, MADV_DONTNEED)
        forget_kernels(self._model())  # loading makes others

    def wake(self) -> None:
        """Allocate what `sleep` freed, without values; `load` must follow. Local. Does nothing if awake."""
        if not self._asleep:
            return
        self._asleep = False
        if self._mesh.device_type != "cpu":
            self._engine.wake_up()

    @property
    def nbytes(self) -> int:
        """The memory of weights and KV cache, which `sleep` frees; on the CPU without what kernels hold apart."""
        return 0 if self._asleep else sum(storage.nbytes() for storage in self._storages())

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return the storages of KV cache and weights, each once."""
        storages = (x.untyped_storage() for x in (*self._runner().kv_caches, *self._model().parameters()))
        return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())

    def _model(self) -> torch.nn.Module:
        return self._runner().get_model()

    def _runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Name the engine and its calls in what the block raises, and to torchrun if this process is killed in it."""
        engine, rank = f"{self._label()} for {self._options.calls}", dist.get_rank()
        advice = "--resume auto, and torchrun --max-restarts N by itself, go on from the last checkpoint"
        try:
            with self._naming(f"{engine} died on rank {rank} {doing}; {advice}"):
                yield
        except Exception as error:
            failed = f"{engine} failed on rank {rank} {doing}: {type(error).__name__}"
            kind = ConnectionError if isinstance(error, OSError) else RuntimeError  # of a server, not of another rank
            raise kind(f"{failed}: {error}; {advice}") from error

    def _label(self) -> str:
        return f"the rollout engine vLLM of ranks {format_ranks(dist.get_process_group_ranks(self._mesh.group('tp')))}"


class ServedEngine(VllmEngine):
    """A pool of vLLM servers as the engine of the ranks of a generate call, which have no memory of it.

    The ranks of the first data-parallel index are as many as a server's workers: each sends weights to one of every
    server. Of every index, the first rank sends requests, to all servers. A server that fails is lost until the next
    update, which tries it again; the run goes on with the others.

    config: of the model. urls: as `RolloutServer.pool` takes them.
    """

    def __init__(
        self, config: ModelConfig, urls: str, options: EngineOptions, mesh: ParallelMesh, decode: Decode, naming: Naming
    ) -> None:
        super().__init__(None, options, mesh, decode, naming)
        self._config, self._servers, self._version, self._updates = config, RolloutServer.pool(urls), "", 0
        self._given: Values | None = {} if options.changes else None
        self._after: str | None = "" if options.changes else None  # the token of the update before
        self._faults: dict[str, str] = {}  # of servers that are lost, by URL
        self._together, self.receives = {}, mesh.rank("batch") == 0

    def load(self, pieces: Iterator[WeightPiece]) -> int:
        self._updates += 1
        self._mesh.agree(self._updates, "the updates of the rollout server", ("tp", "batch"))  # none decodes any more
        leads = self.receives and self._mesh.rank("tp") == 0
        with ThreadPoolExecutor(len(self._servers)) as pool:
            found = list(pool.map(self._reached, self._servers if leads else ()))
        token, found = self._told((secrets.token_hex(16), found))
        self._servers, self._version = [server for server, *_ in found], f"{token[:8]}-{self._updates}"
        faults, sent = {server.url: fault for server, _, fault in found if fault}, 0
        if self.receives:
            with self._named("while its weights were updated"):
                sent, lost = self._send(pieces, token, {server: known for server, known, fault in found if not fault})
            faults |= lost
        for _ in pieces:
            pass
        self._lose(self._told(faults), leads)
        self._after = None if self._after is None else token
        with self._named("while its weights were updated"):
            if len(self._faults) == len(self._servers):
                raise ConnectionError("; ".join(self._faults.values()))
        return sent

    def _told(self, value: T) -> T:
        """Return the value of the first rank on all ranks."""
        told = [value]
        for axis in ("tp", "batch"):
            dist.broadcast_object_list(told, group=self._mesh.group(axis), group_src=0)
        return told[0]

    def _lose(self, faults: dict[str, str], tells: bool = True) -> None:
        for url in sorted(faults.keys() - self._faults.keys()) if tells and len(faults) < len(self._servers) else ():
            warn(f"{faults[url]}; it is lost until an update finds it again, and the other servers go on")
        self._faults = faults

    def _reached(self, server: RolloutServer) -> tuple[RolloutServer, str | None, str]:
        """Stop a server for an update; return it with its name, the token of the update whose values it has, and why it
        is lost."""
        retries = 0 if server.url in self._faults else server.retries
        probe, known, fault = replace(server, timeout=60.0, retries=retries), self._after, ""
        try:
            probe = probe.named()
            if not self._version or probe.tried(probe.version) != self._version:
                known = known and ""  # it has nothing that changes could be sent to
                if problems := server_problems(probe, self._options, self._config):
                    raise ConnectionError(f"the rollout server at {server.url} is another: {'; '.join(problems)}")
            probe.tried(probe.stop)
        except ConnectionError as error:
            fault = f"{error}"
        return replace(server, name=probe.name), known, fault

    def _send(
        self, pieces: Iterator[WeightPiece], token: str, after: Mapping[RolloutServer, str | None]
    ) -> tuple[int, dict[str, str]]:
        """Send this rank's weights to its worker of each server; return their bytes, and why servers were lost.

        after: by server, as `RolloutServer.update` has it.
        """
        group, updates = self._mesh.group("tp"), dict[str, Future[Any]]()
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(2 * len(after) or 1))
            own = {each.url: stack.enter_context(socket.create_server((each.own_address(), 0))) for each in after}
            addresses = gather_objects({url: each.getsockname()[:2] for url, each in own.items()}, group)
            for server, known in after.items() if self._mesh.rank("tp") == 0 else ():
                of_workers = [each[server.url] for each in addresses]
                updates[server.url] = pool.submit(server.update, of_workers, token, self._version, known)
            accepted = {url: pool.submit(_accepted, each, token, updates.get(url)) for url, each in own.items()}
            receivers = {
                server.url: (stack.enter_context(accepted[server.url].result()), known != "")
                for server, known in after.items()
                if accepted[server.url].exception() is None
            }
            sent, faults = send_pieces(receivers, pieces, self._given)
            for url, each in (*accepted.items(), *updates.items()):  # an update says why a worker was lost
                faults |= {url: error} if (error := each.exception()) is not None else {}
        said = {url: f"the rollout server at {url} failed: {type(why).__name__}: {why}" for url, why in faults.items()}
        return sent, dict(ChainMap(*gather_objects(said, group)))

    def generate(self, *args: Any, enough: Enough | None = None, **kwargs: Any) -> list[GeneratedResponse]:
        """See `VllmEngine.generate`. Tokens depend on what else the server decodes only as its kernels do."""
        told, ends = list[Any]([None]), list[int]()

        def ended(number: int) -> bool:
            ends.append(number)
            return enough is not None and enough(number)

        leads = self._mesh.rank("tp") == 0
        if leads:
            first = self._mesh.rank("batch") % len(self._servers)  # so that ranks begin with others
            servers = (*self._servers[first:], *self._servers[:first])
            self._engine = Requests(servers, self._options.slots, self._version, self._faults, self._options.routed)
            try:
                responses = super().generate(*args, enough=ended, **kwargs)
            finally:
                self._engine.close()
            self._lose(self._engine.faults)
            told = [(responses, ends)]
        if self._options.tp > 1:
            dist.broadcast_object_list(told, group=self._mesh.group("tp"), group_src=0)
        if not leads and enough is not None:
            for number in told[0][1]:
                enough(number)
        return told[0][0]

    def _begin(self, request: str, rollout: Rollout, sampling: Mapping[str, Any]) -> None:
        # Without these, the server's defaults, which may be those of a file, would hold.
        off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
        left = rollout.limit - rollout.known
        self._engine.begin(request, rollout.number, rollout.given, left, {**sampling, **off})

    def _step(self) -> Iterable[Written]:
        return self._engine.step()

    def _abort(self, requests: Sequence[str]) -> None:
        self._engine.abort(requests)

    def sleep(self) -> None:
        """Do nothing: the server's memory is not of this run."""

    def wake(self) -> None:
        """Do nothing, as `sleep`."""

    def _label(self) -> str:
        return f"the rollout server{'s' * (len(self._servers) > 1)} {', '.join(each.url for each in self._servers)}"


def _accepted(listener: socket.socket, token: str, update: Future[None] | None) -> socket.socket:
    """Return the connection of a worker that knows the token. Raises what the update raises without one."""
    listener.settimeout(0.2)
    until = time.monotonic() + 60
    with listener:
        while time.monotonic() < until:
            if update is not None and update.done():
                update.result()
                break
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(RolloutServer.timeout)
            if connection.recv(len(token), socket.MSG_WAITALL) == token.encode():
                return connection
            connection.close()
    raise ConnectionError("its worker did not ask for weights")


def server_problems(server: RolloutServer, options: EngineOptions, config: ModelConfig) -> list[str]:
    """Return why a server cannot be the engine of a run. Raises ConnectionError without a server."""
    facts, tp = server.facts(), options.tp
    wanted = {  # what a server must have, and how it is started so
        "tp": (tp, f"--tensor-parallel-size {tp}, the tp of its generate call"),
        "workers": (tp, "no workers besides those of tp"),
        "experts": (options.experts, "--enable-expert-parallel exactly where its generate call has ep"),
        "dtype": (str(options.dtype).removeprefix("torch."), "the policy's --dtype"),
        "logprobs": (options.logprobs_mode, f"--logprobs-mode {options.logprobs_mode}"),
        "defaults": ("vllm", "--generation-config vllm"),
        "quantization": (None, "weights as they are trained, without --quantization"),
        "cache": ("auto", "--kv-cache-dtype auto"),
    }
    different = [*_differences(deciding(config), facts["computes"])]
    problems = [f"it needs the policy's model, and has another: {', '.join(different)}"] if different else []
    problems += [f"it needs {how}, and has {facts[key]}" for key, (value, how) in wanted.items() if facts[key] != value]
    if options.routed and not facts["routed"]:
        problems.append("it needs --enable-return-routed-experts for --router-replay")
    if facts["tokens"] < options.tokens:
        problems.append(f"it needs --max-model-len {options.tokens}, and has {facts['tokens']}")
    return problems


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    """Yield what differs of two configurations. A key that one of them lacks is of another release of transformers."""
    for key in sorted(ours.keys() & theirs.keys()):
        if isinstance(ours[key], Mapping) and isinstance(theirs[key], Mapping):
            yield from _differences(ours[key], theirs[key], f"{inside}{key}.")
        elif ours[key] != theirs[key]:
            yield f"{inside}{key} = {theirs[key]} instead of {ours[key]}"


def pieces_of(
    parts: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    on_disk: Mapping[str, Sequence[DiskTensor]],
    factors: Mapping[str, tuple[Tensor, ...]] = MappingProxyType({}),
) -> Iterator[WeightPiece]:
    """Yield what this rank's parts of parameters are of the tensors in files, one at a time.

    Args:
        parts: by parameter, its values in `boxes`. on_disk: from `disk_layout`.
        factors: of the same parts, `Piece.factors`.
    """
    for name, part in parts.items():
        for tensor in on_disk[name]:
            common, box, of_adapter = tensor.box.overlap(boxes[name]), tensor.box, factors.get(name)
            if common is None:
                nothing = part.new_empty([0] * len(box.sizes))
                where = ((0, 0),) * len(box.sizes)
                yield WeightPiece(tensor.name, tensor.shape, box.sizes, where, nothing, of_adapter and ())
                continue
            where, own = tuple((cut.start, cut.stop) for cut in common.slices(box)), common.slices(boxes[name])
            if of_adapter:
                up, down = of_adapter
                of_adapter = up[own[0]], down[:, own[1]]
            yield WeightPiece(tensor.name, tensor.shape, box.sizes, where, part[own], of_adapter)


def _executor(job: str) -> type:
    """Return vLLM's executor with one worker in this process, as one of several ranks of the run. job: tells shared
    memory of this run apart from others of the machine."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class RankExecutor(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"run:{job}", dist.get_rank(), _local_rank()

    return RankExecutor


def _refusal(error: str, options: EngineOptions) -> str:
    """Return vLLM's refusal to start as the flags of a run have it."""
    if not (needs := re.search(r"\(([\d.]+) GiB KV\s+cache is needed", error)):
        return f"vLLM does not start: {error}"
    has = f"--rollout-cache = {options.cache_bytes / 2**30:g} GiB has no room for the longest sequence"
    tokens = f"{options.tokens} tokens (prompt, --max-new-tokens and --max-observation-tokens)"
    return f"{has}, of {tokens}, which takes {needs[1]} GiB on a rank: raise it, or lower these"


def _local_rank() -> int:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0


def _join(config: Any, job: str) -> None:
    """Take part in the creation of vLLM's process groups on a rank without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    os.environ["VLLM_DIST_IDENT"], backend = job, current_platform.dist_backend
    with set_current_vllm_config(config):
        init_worker_distributed_environment(config, dist.get_rank(), f"run:{job}", _local_rank(), backend)
