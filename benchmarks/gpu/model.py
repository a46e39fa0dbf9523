"""Models and the toolkit's own training step for the sections that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.stage import CausalLMStage
from usp.hf.weights import fill_buffers, initialise
from usp.parallel import ParallelDims, ParallelMesh, local_tensor
from usp.predict.job import ONE_DOCUMENT, Data
from usp.train.build import EngineRecipe, build_engine
from usp.train.resolve import resolve
from usp.train.step import backward

from .setup import Setup, one_rank

Step = Callable[[], tuple[float, float]]  # returns the loss and the norm of the gradient


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=1 << 20,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        )

    def saved(self, folder: Path) -> str:
        """Return the folder of the model's configuration, which is written there."""
        self.config().save_pretrained(folder / f"model-{self.layers}")
        return str(folder / f"model-{self.layers}")


TOY = Shape(64, 128, 256, 2, 4, 2)
SMALL = Shape(512, 1408, 2048, 2, 8, 2)  # for comparisons with the CPU


def llama_8b(setup: Setup, layers: int) -> Shape:
    """Return Llama 3 8B with so many layers; toy sizes for a rehearsal, with at most two."""
    return replace(TOY, layers=min(layers, 2)) if setup.tiny else Shape(4096, 14336, 128256, layers, 32, 8)


def configured(setup: Setup, shape: Shape, tokens: int, **changes: Any) -> TrainConfig:
    """Return the run of one rank on one row of so many tokens."""
    options: dict[str, Any] = {
        "ac": "full",
        "loss_chunk": 64 if setup.tiny else 2048,
        "device": setup.device.type,
        "compile": False,
    }
    options |= {"dtype": str(setup.dtype).removeprefix("torch."), "learning_rate": 1e-3}
    return TrainConfig(model=shape.saved(setup.folder), seq_len=tokens, **{**options, **changes})


def drawn(stage: CausalLMStage) -> None:
    """Draw weights where they are, which is fast."""
    fill_buffers(stage.model)
    with torch.no_grad():
        for parameter in stage.parameters():
            values = local_tensor(parameter)
            values.fill_(1.0) if values.dim() < 2 else values.normal_(std=0.02)


def seeded(stage: CausalLMStage) -> None:
    """Give weights that are the same on every device."""
    initialise(stage.model, 0)


@contextmanager
def engine_step(
    config: TrainConfig,
    data: Data = ONE_DOCUMENT,
    fill: Callable[[CausalLMStage], None] = drawn,
    backend: str = "inductor",
) -> Iterator[Step]:
    """Give a function that runs the trainer's step on random tokens, in a process group of one rank.

    backend: of torch.compile, if the configuration compiles.
    """
    device, resolved = torch.device(config.device), resolve(config, 1, weights=False)
    _, model, _, _ = resolved.valid([])
    config = resolved.largest.config
    with one_rank(device):
        mesh = ParallelMesh.create(ParallelDims(), device.type)
        recipe = EngineRecipe.of(config, model)
        recipe = replace(recipe, compile=backend if recipe.compile else "")
        engine = build_engine(recipe, mesh, device, fill)
        batch = batch_of(config, model.vocab_size, mesh, data, device)

        def step() -> tuple[float, float]:
            loss = float(backward(engine, mesh, batch, config))
            return loss, engine.step(config.learning_rate, config.max_grad_norm)

        yield step


def batch_of(
    config: TrainConfig, vocabulary: int, mesh: ParallelMesh, data: Data, device: torch.device
) -> dict[str, Tensor]:
    """Return a row of random tokens, the same on every device, with the documents of `data`."""
    ids = torch.randint(vocabulary, (1, config.seq_len), generator=torch.Generator().manual_seed(0))
    boundaries = torch.tensor([data.boundaries(config.seq_len)], dtype=torch.int32)
    batch = shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": boundaries}, mesh, layout=config.sp_layout)
    return {key: x if key == "cu_seqlens" else x.to(device) for key, x in batch.items()}
