"""Models that scale or cap their head's logits: the loss is transformers' own, and unknown transforms are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MiniCPM3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.harness.ranks import RankPool
from tests.usp.tiny import ROWS, SEQ_LEN, SIZES, packed_batch
from usp.hf.stage import CausalLMStage, logit_transform
from usp.losses import LogitTransform, NextTokenLoss, vocab_logprobs, vocab_loss
from usp.parallel import ParallelDims, ParallelMesh

FAMILIES: dict[str, tuple[Callable[[], PretrainedConfig], LogitTransform]] = {
    "llama": (lambda: LlamaConfig(**SIZES), LogitTransform()),
    "cohere2": (lambda: Cohere2Config(**SIZES, logit_scale=0.0625, pad_token_id=0), LogitTransform(0.0625)),
    "gemma2": (
        lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.3),
        LogitTransform(1.0, 0.5),
    ),
    "granite": (lambda: GraniteConfig(**SIZES, logits_scaling=3.0), LogitTransform(1 / 3)),
    "hyperclovax": (lambda: HyperCLOVAXConfig(**SIZES, logits_scaling=3.0), LogitTransform(3.0)),
    # scales the input of its head
    "minicpm3": (lambda: MiniCPM3Config(**SIZES | LATENT, dim_model_base=8, pad_token_id=0), LogitTransform(0.25)),
    "phi": (lambda: PhiConfig(**SIZES), LogitTransform()),  # a bias in its head
}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][0](), attn_implementation="eager").double()
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    return model


def loss_and_gradients(family: str) -> list[Tensor]:
    """Return the loss of a stage, and its gradient by each parameter."""
    mesh = ParallelMesh.create(ParallelDims())
    model = tiny(family)
    stage = CausalLMStage(model, mesh, loss_chunk=24, transform=logit_transform(model))
    ids = packed_batch(0)["input_ids"]
    positions = torch.arange(SEQ_LEN).expand(ROWS, -1)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    loss = stage(ids, head=NextTokenLoss(ROWS * (SEQ_LEN - 1)), position_ids=positions, shift_labels=labels)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(but=1)
def test_the_loss_is_that_of_transformers(ranks: RankPool, family: str) -> None:
    found = ranks.run(loss_and_gradients, 1, family)[0]
    model = tiny(family)
    ids = packed_batch(0)["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    loss.backward()
    for number, (own, wanted) in enumerate(
        zip(found, [loss.detach(), *(p.grad for p in model.parameters())], strict=True)
    ):
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-12, msg=f"tensor {number}")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transform_is_measured_without_weights_and_leaves_the_model_as_it_was(family: str) -> None:
    config, wanted = FAMILIES[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    head, forward = model.lm_head, model.model.forward
    found = logit_transform(model)
    assert (found.scale, found.softcap) == pytest.approx((wanted.scale, wanted.softcap), rel=1e-6)
    assert model.lm_head is head and model.model.forward == forward


def test_other_transforms_are_refused() -> None:
    with torch.device("meta"):
        normed = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        shifted = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    head, forward_of = normed.lm_head, type(normed).forward

    def add(**inputs: object) -> object:
        inner = normed.model.forward

        def plus_one(**given: object) -> object:
            out = inner(**given)
            out.last_hidden_state = out.last_hidden_state + 1
            return out

        normed.model.forward = plus_one
        return forward_of(normed, **inputs)

    normed.forward = add
    with pytest.raises(ValueError, match="LlamaForCausalLM changes its last hidden states before its output head"):
        logit_transform(normed)
    assert normed.lm_head is head
    forward = shifted.forward

    def shift(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = out.logits + 1
        return out

    shifted.forward = shift
    with pytest.raises(ValueError, match="by more than a scale and a softcap, which the loss does not know"):
        logit_transform(shifted)


TRANSFORMS = [LogitTransform(0.3), LogitTransform(1.0, 2.0), LogitTransform(1.7, 3.0)]


@pytest.mark.parametrize(("transform", "compile"), [*((x, "") for x in TRANSFORMS), (TRANSFORMS[2], "aot_eager")])
def test_values_and_gradients_of_loss_logprobs_and_entropies(transform: LogitTransform, compile: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).double() for shape in ((2, 13, 6), (23, 6)))
    labels = torch.randint(0, 23, (2, 13), generator=generator)

    def results(own: bool) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        if own:
            options = {"chunk_tokens": 5, "transform": transform, "compile": compile}
            loss = vocab_loss(*inputs, labels, global_tokens=26, **options)
            options = {"chunk_tokens": 5, "temperature": 0.7, "entropy": True, "transform": transform}
            logprobs, entropies = vocab_logprobs(*inputs, labels, **options)
        else:
            logits = transform.scale * (inputs[0] @ inputs[1].T)
            if transform.softcap:
                logits = transform.softcap * torch.tanh(logits / transform.softcap)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            every = (logits / 0.7).log_softmax(-1)
            logprobs, entropies = every.gather(2, labels.unsqueeze(2)).squeeze(2), -(every.exp() * every).sum(-1)
        steps = torch.linspace(-1, 2, 26, dtype=torch.float64).view(2, 13)
        gradients = [
            gradient
            for value in (loss, (logprobs * steps).sum(), (entropies * steps).sum())
            for gradient in torch.autograd.grad(value, inputs, retain_graph=True)
        ]
        return [loss.detach(), logprobs.detach(), entropies.detach(), *gradients]

    for own, wanted in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-13)
