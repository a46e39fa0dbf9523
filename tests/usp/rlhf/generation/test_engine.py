"""vLLM in the processes of a run, here a stand-in: what it derives from weights, and how it refuses to start. See
test_vllm.py for the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from tests.harness.ranks import RankPool
from tests.usp.rlhf.generation.test_server import loaded, packed
from tests.usp.tiny import SIZES, drawn_model
from usp.hf.disk import disk_layout, stored_tensors
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.reallocation.boxes import Box
from usp.rlhf.generation.vllm import EngineOptions, VllmEngine, pieces_of

OPTIONS: dict[str, Any] = {"tp": 1, "experts": False, "dtype": torch.float32, "tokens": 96, "slots": 4}
OPTIONS |= {"calls": "generate", "cache_bytes": 1 << 27, "processed": True}
TOO_SMALL = (
    "To serve at least one request with the model's max seq len (96), (0.5 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (0.12 GiB). Try increasing `gpu_memory_utilization`"
)


def updated(tied: bool) -> None:
    """Compare logits after updates and sleeps with those of a model that has only these weights."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model, weights = packed(drawn_model(config, 5)), drawn_model(config)

    def reload(method: str, kwargs: dict[str, Iterator[tuple[str, Tensor]]]) -> None:
        assert method == "reload_weights"
        loaded(model, dict(kwargs["weights_iterator"]))

    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[])
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    stand_in = SimpleNamespace(collective_rpc=reload, reset_prefix_cache=lambda: None)
    stand_in.model_executor = SimpleNamespace(driver_worker=worker)
    mesh = ParallelMesh.create(ParallelDims(dp_shard=1))
    engine = VllmEngine(stand_in, EngineOptions(**OPTIONS), mesh, lambda ids: "", lambda doing: nullcontext())
    own, ids = stored_tensors(weights), torch.arange(20)[None]
    on_disk = disk_layout(weights, {name: x.shape for name, x in own.items()})
    for version in range(4):
        if version != 2:  # the third update follows without a sleep
            engine.sleep()
            assert not any(getattr(layer, "cpu_linear", None) for layer in model.modules())
            engine.wake()
        initialise(weights, version)
        engine.load(pieces_of(own, {name: Box.whole(x.shape) for name, x in own.items()}, on_disk))
        torch.testing.assert_close(model(ids).logits, weights(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_an_update_renews_what_is_derived_from_weights(ranks: RankPool, tied: bool) -> None:
    ranks.run(updated, 1, tied)


def started(refusal: str, by_transformers: bool = False) -> tuple[str, list[str]]:
    """What ranks 0 and 1 of three say whose engines do not start, and what shared memory is left."""
    told: list[Path] = []

    class Executor:
        pass

    class Arguments:
        def __init__(self, **options: Any) -> None:
            self.job = options["distributed_executor_backend"]()._distributed_args()[0].removeprefix("run:")

        def create_engine_config(self) -> Any:
            model_config = SimpleNamespace(using_transformers_backend=lambda: by_transformers)
            return SimpleNamespace(job=self.job, model_config=model_config)

    def engine(config: Any) -> None:
        told.append(Path("/dev/shm") / f"{config.job}-tp-{dist.get_rank()}-cpushm_0")
        told[-1].write_bytes(bytes(1 << 20))
        raise ValueError(refusal)

    modules = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.executor")}
    modules |= {name: ModuleType(name) for name in ("vllm.v1.engine.llm_engine", "vllm.v1.executor.uniproc_executor")}
    contents: Any = modules
    contents["vllm"].EngineArgs = Arguments
    contents["vllm.v1.engine.llm_engine"].LLMEngine = SimpleNamespace(from_vllm_config=engine)
    contents["vllm.v1.executor.uniproc_executor"].UniProcExecutor = Executor
    mesh = ParallelMesh.create(ParallelDims(dp_shard=2), "cpu", (0, 1))
    with patch.dict(sys.modules, modules), patch("usp.rlhf.generation.vllm._join"), patch.dict("os.environ"):
        try:
            VllmEngine.start(
                LlamaConfig(**SIZES), EngineOptions(**OPTIONS), mesh, lambda ids: "", lambda _: nullcontext()
            )
        except ValueError as error:
            dist.barrier()
            return str(error), [file.name for file in told if file.exists()]
    raise AssertionError("it started")


@pytest.mark.slow
def test_an_engine_that_does_not_start_says_so_on_all_ranks_and_leaves_nothing(ranks: RankPool) -> None:
    wanted = (
        "--rollout-cache = 0.125 GiB has no room for the longest sequence, of 96 tokens (prompt, --max-new-tokens and "
        "--max-observation-tokens), which takes 0.5 GiB on a rank: raise it, or lower these"
    )
    assert ranks.run(started, 3, TOO_SMALL) == [(wanted, [])] * 3
    assert ranks.run(started, 3, "no head dim of 8") == [("vLLM does not start: no head dim of 8", [])] * 3


def test_an_engine_that_would_change_the_classes_of_the_run_is_refused(ranks: RankPool) -> None:
    """Training would then fail: 'Olmo2Model' object has no attribute 'do_not_compile'."""
    for problem, left in ranks.run(started, 3, "", True):
        assert problem.startswith("vLLM does not decode llama in the run: it decodes it by transformers' own class")
        assert not left
