"""What compiled layers save for their backward, counted where torch saves it, on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from transformers import AutoConfig

from usp import apply_unified_sp
from usp.config import TrainConfig
from usp.hf.integrate import decoder_layers
from usp.hf.models import empty_model, load_model_config, materialise
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


class _Counted(Exception):
    """Ends a forward after its layer."""


def saved_bytes(model_type: str, ulysses: int = 1, saves_all: bool = False) -> int:
    """Return the bytes that the first rank's compiled layer saves, without parameters and rotary tables."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_inductor(graph: Any, inputs: Any) -> Any:
        """Divide a graph into forward and backward as inductor does, and run both operator by operator."""
        return compile_fx(graph, inputs, inner_compile=lambda part, *_, **__: make_boxed_func(part.forward))

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
        compile_layers([layer], as_inductor, saves_all=saves_all)  # type: ignore[arg-type]
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
                compiled(fake.from_tensor(hidden.detach()).requires_grad_(), *args, **kwargs)
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
