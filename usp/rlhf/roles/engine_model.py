"""A role's copy whose weights are those of a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from usp.hf.disk import disk_layout, stored_tensors
from usp.hf.lora import Lora, MergedWeights
from usp.hf.models import empty_model
from usp.parallel import ParallelMesh
from usp.parallel.reallocation.boxes import local_box, local_part
from usp.rlhf.generation.vllm import VllmEngine, pieces_of, whole_vocabulary
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.served import WeightPiece

from .role_model import RoleModel, RoleSpec


class EngineModel(RoleModel):
    """A `RoleModel` that decodes with an engine, which has the memory: between `allocate` and `release`.

    Its own tensors never have any: they say which box of each parameter this rank needs. `take` gives the engine the
    values. With adapters, this copy has its base and them as any other has where the engine takes what they add up to.
    """

    def __init__(self, spec: RoleSpec, layout: CallLayout, mesh: ParallelMesh, engine: VllmEngine) -> None:
        super().__init__(spec, layout, mesh)
        self._vllm = engine
        whole = empty_model(spec.config)
        self._on_disk = disk_layout(whole, {name: tensor.shape for name, tensor in stored_tensors(whole).items()})
        self._boxes = {name: local_box(weight) for name, weight in self.weights().items()}

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers that this rank's engine needs, without memory; or adapters."""
        if not self._vllm.receives:
            return {}
        return {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            if self.spec.lora is None and self._is_whole(weight)
            else weight
            for name, weight in super().weights().items()
        }

    def fill(self) -> None:
        raise RuntimeError(f"{self.spec.role} is not trained, and an engine takes its weights from a trained copy")

    def allocate(self) -> None:
        if self.spec.lora is not None and self._vllm.receives:
            super().allocate()
        self._vllm.wake()

    def release(self) -> None:
        super().release()
        self._vllm.sleep()

    def take(self, rounds: Iterator[Mapping[str, Tensor]]) -> int:
        """Give the engine this rank's boxes of all weights, in rounds; return the bytes that left the run for it.
        Collective over the mesh."""
        pieces = (piece for parts in rounds for piece in pieces_of(parts, self._boxes, self._on_disk))
        return self._vllm.load(pieces if self.spec.lora is None else self._adapted(rounds, self.spec.lora))

    def _adapted(self, rounds: Iterator[Mapping[str, Tensor]], lora: Lora) -> Iterator[WeightPiece]:
        for _ in rounds:  # which fill the adapters
            pass
        if not self._vllm.receives:
            return
        merged = MergedWeights([self.stage.model], lora)
        for name, weight in merged.base.items():
            if self._is_whole(weight) and isinstance(weight, DTensor):
                weight = weight.full_tensor()
            boxes = {name: local_box(weight)}
            yield from pieces_of({name: local_part(weight)}, boxes, self._on_disk, {name: merged.factors(name)})

    def _is_whole(self, weight: Tensor) -> bool:
        """Return whether each of the engine's ranks needs all of a weight."""
        rows = self.spec.config.vocab_size
        return weight.ndim > 0 and weight.shape[0] == rows and whole_vocabulary(rows, self.layout.dims.tp)

    def _generates(self) -> VllmEngine:
        return self._vllm

    def parts(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Allocate this rank's boxes of some weights, for a round; adapters stay where they are."""
        weights, device = self.weights(), torch.device(self.mesh.device_type)
        held = [name for name in names if name in weights]
        if self.spec.lora is not None:
            return {name: weights[name] for name in held}
        return {name: torch.empty(self._boxes[name].sizes, dtype=weights[name].dtype, device=device) for name in held}
