"""What compiled layers save for their backward, and what their kernels and those of the loss move, counted where torch
saves and schedules it, on tensors without memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import AutoConfig

from usp import apply_unified_sp
from usp.config import TrainConfig
from usp.hf.integrate import decoder_layers
from usp.hf.models import empty_model, load_model_config, materialise
from usp.losses import UNCHANGED, LogitTransform, vocab_loss
from usp.model.recompute import compile_layers
from usp.parallel import ParallelDims, ParallelMesh
from usp.predict.fake_world import fake_world
from usp.predict.memory import layer_memory
from usp.train.resolve import job_of

pytestmark = pytest.mark.compiles

TOKENS, HIDDEN = 8192, 4096
# A layer of Llama-3-8B; the embedding, which is computed, is smaller.
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": 14336, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": TOKENS}

# Gets the graph of a forward or of a backward, its inputs, and which it is.
Seen: TypeAlias = Callable[[GraphModule, Any, bool], None]


def as_inductor(graph: Any, inputs: Any, seen: Seen) -> Any:
    """Divide a graph into forward and backward as inductor does, and run both operator by operator."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def inner(part: GraphModule, inputs: Any, **options: Any) -> Any:
        seen(part, inputs, options.get("is_backward", False))
        return make_boxed_func(part.forward)

    return compile_fx(graph, inputs, inner_compile=inner)


def operators(graph: Any, inputs: Any, seen: Seen) -> Any:
    """Give the graphs of eager operators, and run them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compiler(is_backward: bool) -> Callable[..., Any]:
        def inner(part: GraphModule, inputs: Any) -> Any:
            seen(part, inputs, is_backward)
            return make_boxed_func(part.forward)

        return inner

    return aot_autograd(fw_compiler=compiler(False), bw_compiler=compiler(True))(graph, inputs)


def operator_bytes(part: GraphModule) -> Iterator[int]:
    """Yield what each operator moves, without views, products and attention."""
    for node in part.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target.is_view:
            continue
        if target.overloadpacket not in (torch.ops.aten.mm, torch.ops.aten._unsafe_view):
            values = [*(x.meta["val"] for x in node.all_input_nodes), *tree_leaves(node.meta["val"])]
            dims = ([size for size, stride in zip(x.shape, x.stride(), strict=True) if stride] for x in values)
            yield sum(x.element_size() * prod(shape) for x, shape in zip(values, dims, strict=True))


@contextmanager
def scheduled(part: GraphModule, inputs: Any, is_backward: bool) -> Iterator[GraphLowering]:
    """Let inductor decide on its kernels for an H100. Neither a GPU nor Triton is needed, as none is compiled."""
    from torch._inductor import scheduler
    from torch._inductor.compile_fx import _recursive_post_grad_passes, record_original_output_strides, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    device, part, fake = torch.device("cuda:0"), copy.deepcopy(part), torch._guards.detect_fake_mode(inputs)
    assert fake is not None

    def moved(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    sizes = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32}
    h100 = DeviceProperties("cuda", 0, multi_processor_count=132, cc=90, major=9, max_threads_per_block=1024, **sizes)
    with pytest.MonkeyPatch.context() as patch, V.set_fake_mode(fake):
        patch.setattr(DeviceProperties, "create", lambda device: h100)
        patch.setattr(scheduler, "has_triton", lambda: True)
        record_original_output_strides(part)
        view_to_reshape(part)
        _recursive_post_grad_passes(part, is_inference=False)
        with fake:
            for node in part.graph.nodes:
                node.meta |= {"val": tree_map_only(Tensor, moved, node.meta.get("val"))}
                node.kwargs = {name: device if name == "device" else x for name, x in node.kwargs.items()}
            inputs = tree_map_only(Tensor, moved, [*inputs])
            graph = GraphLowering(part, example_inputs=inputs, is_inference=False, is_backward=is_backward)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                yield graph


def kernel_bytes(part: GraphModule, inputs: Any, is_backward: bool) -> Iterator[int]:
    """Yield what each kernel moves, without products and attention. It reads an input once and writes an output
    once."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    with scheduled(part, inputs, is_backward) as graph:
        for node in graph.scheduler.nodes:
            if not node.is_extern() and not isinstance(node, NopKernelSchedulerNode):
                # What is indexed by another tensor counts as whole, unless there are fewer steps.
                steps = max(prod(int(size) for sizes in x.get_ranges() for size in sizes) for x in node.get_nodes())
                found = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
                yield sum(min(each, 8 * steps) for each in found.values())


def kernel_sources(part: GraphModule, inputs: Any, is_backward: bool) -> Iterator[str]:
    """Yield the Triton source of each kernel, without the decorator that runs it on a GPU."""
    with pytest.MonkeyPatch.context() as patch, scheduled(part, inputs, is_backward) as graph:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")
        graph.scheduler.codegen()
        for source in graph.wrapper_code.src_to_kernel:
            named = source.replace("Placeholder.KERNEL_NAME", "kernel").replace(
                "triton_helpers.set_driver_to_gpu()", ""
            )
            signature = re.search(r"'signature': (\{.*?\})", named)
            assert signature
            start, end = named.index("@triton_heuristics"), named.index("@triton.jit")
            yield f"{named[:start]}SIGNATURE = {signature[1]}\n{named[end:]}"


class _Counted(Exception):
    """Ends a forward after its layer."""


def saved_bytes(
    model_type: str,
    ulysses: int = 1,
    saves_all: bool = False,
    backend: Callable[..., Any] = as_inductor,
    seen: Seen = lambda *_: None,
) -> int:
    """Return the bytes that the first rank's compiled layer saves, without parameters and rotary tables. With `seen`,
    also compute its backward."""
    torch.compiler.reset()
    saved: dict[int, Tensor] = {}
    config = AutoConfig.for_model(model_type, **SIZES, pad_token_id=0)
    with fake_world(ulysses, 0):
        mesh = ParallelMesh.create(ParallelDims(ulysses=ulysses), "cpu")
        model, fake = empty_model(config).to(torch.bfloat16), FakeTensorMode(allow_non_fake_inputs=True)
        apply_unified_sp(model, mesh)
        (layer,) = decoder_layers(model)
        with fake:
            materialise(layer, torch.device("cpu"))
        for module in (model.base_model.embed_tokens, model.base_model.rotary_emb):
            materialise(module, torch.device("cpu"))
        compile_layers([layer], partial(backend, seen=seen), saves_all=saves_all)  # type: ignore[arg-type]
        compiled, others = layer.forward, {x.untyped_storage()._cdata for x in layer.parameters()}

        def pack(x: Tensor) -> Tensor:
            if x.untyped_storage()._cdata not in others:
                saved[x.untyped_storage()._cdata] = x
            return x

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> None:
            args, kwargs = tree_map(
                lambda x: fake.from_tensor(x.detach()) if isinstance(x, Tensor) else x, (args, kwargs)
            )
            others.update(x.untyped_storage()._cdata for x in kwargs["position_embeddings"])
            with saved_tensors_hooks(pack, lambda x: x):
                out = compiled(fake.from_tensor(hidden.detach()).requires_grad_(), *args, **kwargs)
            with fake:
                out.backward(torch.empty_like(out))
            raise _Counted

        layer.forward = forward
        positions = torch.arange(TOKENS)[None].chunk(ulysses, dim=1)[0]
        with pytest.raises(_Counted):
            model.base_model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
    return sum(x.untyped_storage().nbytes() for x in saved.values())


# Per token and hidden element: the input and the residual, q, k, v, attention's output, gate and up.
LLAMA = 2 + 2 + 2 * 1.5 + 2 + 2 * 7


@pytest.mark.parametrize(
    ("model_type", "ulysses", "wanted"),
    [("llama", 1, LLAMA), ("llama", 2, LLAMA + 2)],  # attention's output before and after its all-to-all
)
@pytest.mark.slow(but=1)
def test_a_compiled_layer_saves_what_a_fused_one_must(model_type: str, ulysses: int, wanted: float) -> None:
    found = saved_bytes(model_type, ulysses) / (TOKENS // ulysses * HIDDEN)
    assert wanted <= found <= wanted + 0.1  # log-sum-exps and mean squares
    config = TrainConfig(model="llama3-8b", seq_len=TOKENS, sp_ulysses=ulysses, compile=True)
    predicted = layer_memory(job_of(config, load_model_config(config.model), ulysses), 0).saved
    assert predicted / (TOKENS // ulysses * HIDDEN) == pytest.approx(found, abs=0.1)


@pytest.mark.slow
def test_a_layer_that_is_recomputed_as_a_whole_saves_all() -> None:
    assert saved_bytes("llama", saves_all=True) / (TOKENS * HIDDEN) == pytest.approx(LLAMA + 4 + 7, abs=0.1)


# Bytes per token and hidden element that one kernel for each operator reads and writes, in bfloat16.
FORWARD = {
    "norm": 2 + 2,
    "rotary": 2 * (2 + 0.5),
    "norm with residual": 2 + 2 + 2 + 2,
    "SwiGLU": 7 + 7 + 7,
    "residual": 2 + 2 + 2,
}
BACKWARD = {
    "SwiGLU": 7 + 7 + 7 + 7 + 7,
    "norm with residual": 2 + 2 + 2 + 2 + 2,  # gradients by gate and up, its input, the residual's gradient, the sum
    "rotary": 2 * (2 + 0.5),
    "norm": 2 + 2 + 2 + 2 + 2 + 2,
}
AGAIN = 7 + 2 + 2  # written again: what the last linear reads, and both norms' outputs


@pytest.mark.parametrize(
    ("model_type", "ulysses", "saves_all", "more", "kernels", "limit"),
    [
        ("llama", 1, False, 0, (6, 8), 1.17),
        ("llama", 2, False, 0, (6, 8), 1.17),
        ("llama", 1, True, 0, (6, 8), 1.17),
        ("qwen3", 1, False, 3 * 2.5, (6, 12), 1.17),  # backward of the norms of heads
        ("gemma2", 1, False, 6 + 2 + 2, (6, 12), 1.25),  # backward of the norms of what attention and the MLP return
    ],
)
@pytest.mark.slow(but=1)
def test_a_compiled_layer_moves_what_fused_kernels_must(
    model_type: str, ulysses: int, saves_all: bool, more: float, kernels: tuple[int, int], limit: float
) -> None:
    found: list[list[int]] = []
    saved_bytes(model_type, ulysses, saves_all, seen=lambda *part: found.append([*kernel_bytes(*part)]))
    assert (*map(len, found),) == kernels  # of one graph
    must = sum(FORWARD.values()) + sum(BACKWARD.values()) + (0 if saves_all else AGAIN) + more
    assert 1 <= sum(map(sum, found)) / (TOKENS // ulysses * HIDDEN) / must <= limit


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.slow
def test_the_kernels_of_a_layer_compile(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install triton`, no GPU; ptxas comes with it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources: list[str] = []
    saved_bytes("llama", seen=lambda *part: sources.extend(kernel_sources(*part)))
    assert len(sources) == 12  # of 14 kernels two are written once for both
    for number, source in enumerate(sources):
        path = tmp_path / f"kernel{number}.py"  # Triton reads a function's file
        path.write_text(source)
        spec = spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        spec.loader.exec_module(module := module_from_spec(spec))
        constants = {name for name, kind in module.SIGNATURE.items() if kind == "constexpr"}
        blocks = {"XBLOCK": 8, "R0_BLOCK": 1024} if "r0_numel" in module.SIGNATURE else {"XBLOCK": 1024}
        blocks |= {"RSPLIT": 1, "NUM_STAGES": 1, "RSPLIT_SIZE": 64}
        asked = ASTSource(module.kernel, module.SIGNATURE, {name: blocks[name] for name in constants})
        assembly = triton.compile(asked, target=GPUTarget("cuda", capability, 32)).asm
        assert f".target sm_{capability}" in assembly["ptx"] and assembly["cubin"]


@pytest.mark.slow
def test_an_eager_layer_moves_four_times_as_much() -> None:
    found: list[list[int]] = []
    saved_bytes("llama", backend=operators, seen=lambda part, *_: found.append([*operator_bytes(part)]))
    must = sum(FORWARD.values()) + sum(BACKWARD.values())
    assert sum(map(len, found)) > 80 and sum(map(sum, found)) / (TOKENS * HIDDEN) > 4 * must


@pytest.mark.parametrize("transform", [UNCHANGED, LogitTransform(0.5, 3.0)], ids=["plain", "softcap"])
def test_the_loss_reads_logits_twice_and_writes_their_gradient(transform: LogitTransform) -> None:
    tokens, vocabulary, found = 1024, 16384, list[list[int]]()
    drawn = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=drawn).bfloat16() for shape in ((1, tokens, 8), (vocabulary, 8)))
    labels = torch.randint(vocabulary, (1, tokens), generator=drawn)

    def results(backend: Any) -> list[Tensor]:
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options: Any = {"transform": transform, "compile": backend}
        loss = vocab_loss(*inputs, labels, global_tokens=tokens, chunk_tokens=tokens, **options)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    torch.compiler.reset()
    compiled = partial(as_inductor, seen=lambda *part: found.append([*kernel_bytes(*part)]))
    for of_graph, of_operators in zip(results(compiled), results(""), strict=True):
        torch.testing.assert_close(of_graph, of_operators, rtol=2e-2, atol=1e-6)
    (kernels,) = found
    assert len(kernels) == 4 and 6 <= sum(kernels) / (tokens * vocabulary) <= 6.1
