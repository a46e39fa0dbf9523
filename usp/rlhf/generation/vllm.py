"""vLLM as the engine of a generate call, in the processes of the run.

    trained layout --reallocation, a layer at a time--> this rank's shards --vLLM's own loaders--> its fused parameters
    token ids --continuous batching of vLLM--> token ids and log-probabilities

Every rank of a tensor-parallel group has an engine that computes its part, as with vLLM's external launcher, and all of
them schedule the same sequences. vLLM keeps its process groups in globals, so a process has one engine at most. It is
imported where an engine starts, and nowhere else.
"""

from __future__ import annotations

import math
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from mmap import MADV_DONTNEED, PAGESIZE
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelMesh, format_ranks
from parallel.reallocation.boxes import Box
from usp.hf.disk import DiskTensor
from usp.hf.models import ModelConfig
from usp.rlhf.environments.sandbox import call
from usp.rlhf.graph import Generate
from usp.rlhf.samples import derived_seed

from .decoding import Decode, GeneratedResponse, Rollout, Stops
from .turns import Turns

LEAST_TEMPERATURE = 0.01  # vLLM samples below it as at it
_VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to it, and divides the padded one
Enough: TypeAlias = Callable[[int], bool]  # see `Generator.generate`
Naming: TypeAlias = Callable[[str], AbstractContextManager[Any]]  # see `Watchdog.naming`


class RolloutEngine(Protocol):
    """What a generate call decodes with."""

    def generate(
        self,
        prompts: Sequence[Tensor],
        work: Generate,
        seeds: Sequence[int],
        samples: Sequence[tuple[int, int]] = (),
        *,
        begun: Sequence[Sequence[int]] = (),
        enough: Enough | None = None,
    ) -> list[GeneratedResponse]:
        """Return one response per prompt, the same on every rank of a data-parallel group. See `Generator.generate`."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, the same on all of its ranks.

    Attributes:
        calls: that it decodes for, to be named in errors.
        tp: consecutive ranks that share a model. experts: these ranks divide the experts, instead of each expert.
        tokens: the longest sequence. slots: most sequences that are decoded at a time.
        cache_bytes: of the KV cache on a rank.
        processed: return the log-probabilities of the sampled distribution, without top-k and top-p; else those at
            temperature 1.
    """

    calls: str
    tp: int
    experts: bool
    dtype: torch.dtype
    tokens: int
    slots: int
    cache_bytes: int
    processed: bool


def sampling_problems(works: Iterable[Generate]) -> list[str]:
    """Return why vLLM cannot sample as generate calls ask, of which it returns log-probabilities of one kind."""
    problems = [] if find_spec("vllm") else ["the package vllm is not installed: pip install it, or use another engine"]
    works = list(works)
    temperatures = sorted({work.temperature for work in works})
    if cut := any(work.top_k or work.top_p < 1 for work in works):
        temperatures = [each for each in temperatures if each not in (0, 1)]
    elif problem := [each for each in temperatures if 0 < each < LEAST_TEMPERATURE]:
        problems.append(f"temperature={problem[0]} is below vLLM's least, {LEAST_TEMPERATURE}: use 0 or more than that")
    if cut and temperatures:
        problems.append(
            f"with top_k or top_p vLLM returns log-probabilities at temperature 1 or after the cut, and training needs "
            f"those at temperature={temperatures[0]} before it: use temperature 1 or 0, or neither top_k nor top_p"
        )
    return problems


def whole_vocabulary(rows: int, tp: int) -> bool:
    """Return whether vLLM's ranks hold other rows of the embedding and the head than an even division gives them."""
    return tp > 1 and rows % _VOCABULARY_MULTIPLE > 0


class VllmEngine:
    """An engine of this rank. Collective over its tensor-parallel group, unless said otherwise.

    It has memory and weights only between `wake` and `sleep`.
    """

    def __init__(self, engine: Any, options: EngineOptions, mesh: ParallelMesh, decode: Decode, naming: Naming) -> None:
        self._engine, self._options, self._mesh, self._decode, self._naming = engine, options, mesh, decode, naming
        self._asleep = False

    @staticmethod
    def start(
        config: ModelConfig, options: EngineOptions, mesh: ParallelMesh, decode: Decode, naming: Naming
    ) -> VllmEngine | None:
        """Start the engine of this rank; None on ranks outside of `mesh`. Collective over the world, as vLLM's process
        groups are.

        It sets, for this process: VLLM_ENABLE_V1_MULTIPROCESSING=0, so that ranks decode in step; VLLM_NO_USAGE_STATS=1
        and HF_HUB_OFFLINE=1, so that nothing is sent or fetched; VLLM_LOGGING_LEVEL=WARNING.

        Raises ValueError for a model that vLLM does not know or cannot divide so.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        from vllm import EngineArgs
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
                    logprobs_mode="processed_logprobs" if options.processed else "raw_logprobs",
                    generation_config="vllm",  # no defaults of sampling from files
                    enable_sleep_mode=mesh.device_type != "cpu",
                )
                vllm_config = arguments.create_engine_config()
            except ValueError as error:
                raise ValueError(f"vLLM refuses {config.model_type}: {error}") from error
            if mesh.member:
                engine = LLMEngine.from_vllm_config(vllm_config)
            else:
                _join(vllm_config, job[0])
        torch.set_num_threads = sets_threads  # vLLM replaces it on CPUs
        torch.set_num_threads(threads)
        dist.barrier()  # all have opened the shared memory of their group, which lasts as long as they do
        for file in Path("/dev/shm").glob(f"{job[0]}-*"):
            file.unlink(missing_ok=True)
        return VllmEngine(engine, options, mesh, decode, naming) if mesh.member else None

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace all weights by those that `weights` yields, by their names in files: whole tensors, of which only
        this rank's part counts. All of them are consumed."""
        for layer in self._model().modules() if self._mesh.device_type == "cpu" else ():
            experts: Any = getattr(layer, "quant_method", None)
            if hasattr(experts, "moe_kernel"):
                experts.moe_kernel = None  # else vLLM leaves experts as in files, which kernels of CPUs do not read
        with self._named("while its weights were updated"):
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        for _ in weights:
            pass
        self._engine.reset_prefix_cache()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor],
        work: Generate,
        seeds: Sequence[int],
        samples: Sequence[tuple[int, int]] = (),
        *,
        begun: Sequence[Sequence[int]] = (),
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
        rollouts, episodes, turns = Rollout.begin(prompts, work, seeds, begun, longest), work.episodes, None
        tp = {"tp": self._mesh.group("tp")} if self._options.tp > 1 else {}
        if episodes is not None:
            turns = Turns(rollouts, episodes, samples, tp, leads=self._mesh.rank("tp") == 0, context=longest)
        try:
            with self._named("while it decoded"):
                self._decode_all(rollouts, work, turns, enough)
        finally:
            if turns is not None:
                turns.close()
        responses = turns.responses() if turns is not None else [rollout.response() for rollout in rollouts]
        for number, response in enumerate(responses):
            if not bool(response.logprobs.isfinite().all()):
                raise RuntimeError(
                    f"vLLM's logits of response {number} are not finite: its weights or its activations in "
                    f"{self._options.dtype} are, or it took weights of other ranks"
                )
        if tp:
            self._mesh.agree([each.tokens.tolist() for each in responses], "the tokens that vLLM decoded", ("tp",))
        return responses

    def _decode_all(
        self, rollouts: Sequence[Rollout], work: Generate, turns: Turns | None, enough: Enough | None
    ) -> None:
        """Decode the rollouts, and those that follow their turns, until they end or are `enough`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, ended, requests = self._engine, Stops(work, self._decode), count()
        active, leaves = dict[str, Rollout](), False  # active: by request

        def begin(rollout: Rollout) -> None:
            before, request = rollout.before, str(next(requests))
            sampling = SamplingParams(
                temperature=work.temperature,
                top_k=work.top_k,
                top_p=work.top_p,
                seed=derived_seed(rollout.seed, before) if before else rollout.seed,  # whose noise begins here
                max_tokens=rollout.limit,
                stop_token_ids=list(work.stop_ids),
                ignore_eos=True,  # stop ids say where responses end
                logprobs=0,  # those of the tokens alone
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            active[request] = rollout
            engine.add_request(request, {"prompt_token_ids": rollout.prompt}, sampling)

        for rollout in rollouts:
            begin(rollout)
        while not leaves and (active or (turns is not None and turns.waiting)):
            for rollout in turns.go_on(wait=not active) if turns is not None and turns.waiting else ():
                begin(rollout)
            for output in engine.step() if active else ():
                if (written := active.get(output.request_id)) is None:
                    continue  # its stop string is complete
                (newest,) = output.outputs
                rows = zip(newest.token_ids, newest.logprobs, strict=True)
                if any(written.take(token, row[token].logprob, ended) for token, row in rows):
                    del active[output.request_id]
                    if not output.finished:
                        engine.abort_request([output.request_id])
                    if turns is not None:
                        turns.end_turn(written)
                    leaves |= enough is not None and enough(written.number)
                elif output.finished:
                    raise RuntimeError(f"it ended a response early, for the reason {newest.finish_reason}")
        engine.abort_request(list(active))

    def sleep(self) -> None:
        """Free the memory of weights and KV cache, and lose both. Local. Does nothing if asleep."""
        if self._asleep:
            return
        self._asleep = True
        if self._mesh.device_type != "cpu":
            self._engine.sleep(level=2)
            return
        for storage in self._storages():
            _give_back(storage)
        for layer in self._model().modules():
            if hasattr(layer, "cpu_linear"):
                del layer.cpu_linear  # which holds weights in the layout of a kernel; loading makes another

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
        return _distinct([*self._runner().kv_caches, *self._model().parameters()])

    def _model(self) -> torch.nn.Module:
        return self._runner().get_model()

    def _runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Name the engine and its calls in what the block raises, and to torchrun if this process is killed in it."""
        ranks, rank = format_ranks(dist.get_process_group_ranks(self._mesh.group("tp"))), dist.get_rank()
        engine = f"the rollout engine vLLM of ranks {ranks} for {self._options.calls}"
        advice = "--resume auto, and torchrun --max-restarts N by itself, go on from the last checkpoint"
        try:
            with self._naming(f"{engine} died on rank {rank} {doing}; {advice}"):
                yield
        except Exception as error:
            failed = f"{engine} failed on rank {rank} {doing}: {type(error).__name__}"
            raise RuntimeError(f"{failed}: {error}; {advice}") from error


def whole_tensors(
    parts: Mapping[str, Tensor], boxes: Mapping[str, Box], on_disk: Mapping[str, Sequence[DiskTensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in files that this rank's parts of parameters belong to, one at a time: nan, where another rank
    has the values, so that whoever reads them there notices.

    Args:
        parts: by parameter, its values in `boxes`. on_disk: from `disk_layout`.
    """
    for name, part in parts.items():
        for tensor in on_disk[name]:
            common = tensor.box.overlap(boxes[name])
            if common == tensor.box:
                yield tensor.name, part[common.slices(boxes[name])].reshape(tensor.shape)
                continue
            whole = torch.full(tensor.box.sizes, math.nan, dtype=part.dtype, device=part.device)
            if common is not None:
                whole[common.slices(tensor.box)] = part[common.slices(boxes[name])]
            yield tensor.name, whole.reshape(tensor.shape)


def _executor(job: str) -> type:
    """Return vLLM's executor with one worker in this process, as one of several ranks of the run.

    job: tells shared memory of this run apart from others of the machine.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class RankExecutor(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            return f"run:{job}", dist.get_rank(), _local_rank()

    return RankExecutor


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


def _give_back(storage: torch.UntypedStorage) -> None:
    """Give the pages of a storage in the host's memory back to the system. Its address stays, and it reads as zeros:
    attention reads beyond the end of a sequence, where a nan is not hidden by its weight of 0."""
    begin, end = -(-storage.data_ptr() // PAGESIZE), (storage.data_ptr() + storage.nbytes()) // PAGESIZE
    if begin < end:
        call("madvise", begin * PAGESIZE, (end - begin) * PAGESIZE, MADV_DONTNEED)


def _distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once."""
    return list({storage.data_ptr(): storage for x in tensors if (storage := x.untyped_storage()).nbytes()}.values())
