"""What a simulation must know about the calls and the weights of a plan, each number remembered. Pure."""

from __future__ import annotations

from functools import cache
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


class Remembered:
    """Estimates that compute each number once: a search asks for the same ones thousands of times."""

    def __init__(self, estimates: Estimates) -> None:
        self.call_seconds = cache(estimates.call_seconds)
        self.call_bytes = cache(estimates.call_bytes)
        self.weight_bytes = cache(estimates.weight_bytes)
        self.state_bytes = cache(estimates.state_bytes)
        self.fill_seconds = cache(estimates.fill_seconds)
        self.load_seconds = cache(estimates.load_seconds)
        self.state_load_seconds = cache(estimates.state_load_seconds)
        self.transfer_seconds = cache(estimates.transfer_seconds)
