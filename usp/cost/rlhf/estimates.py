"""What a simulation must know about the calls and the weights of a plan."""

from __future__ import annotations

from typing import Protocol

from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout


class Estimates(Protocol):
    """Predicted seconds and bytes. Bytes are those of one rank: the one that has most."""

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        """Return the time of a call on all its ranks, from the first that begins to the last that ends."""

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        """Return the memory that a call takes beside weights and optimizer: activations, gradients, KV cache."""

    def weight_bytes(self, copy: WeightCopy) -> float:
        """Return the memory of the weights of a copy."""

    def state_bytes(self, copy: WeightCopy) -> float:
        """Return the memory that a trained copy holds between train steps beside its weights: optimizer states."""

    def fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        """Return the time to fill a copy from another, on all ranks of both."""

    def load_seconds(self, copy: WeightCopy) -> float:
        """Return the time to move the weights of a copy from the host to the device, or back."""

    def state_load_seconds(self, copy: WeightCopy) -> float:
        """Return the time to move the optimizer states of a trained copy from the host to the device, or back."""

    def transfer_seconds(self, producer: str, source: CallLayout, target: CallLayout) -> float:
        """Return the time to send the outputs of a call to another layout."""
