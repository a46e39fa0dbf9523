"""Offloaded activations with copies that end as late as they may: values, order, and what is on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from torch import Tensor, nn

from usp.model import recompute
from usp.model.recompute import apply_activation_checkpointing

LAYERS = 5
Event = tuple[str, int]  # after so many copies of a stream


class LateCopier:
    """Copies when somebody waits: from tensors that must still be there then, to tensors that are nan until then.

    Attributes:
        log: "fetch" for each `to_device`.
        most: the most tensors on the device at a time.
    """

    def __init__(self, log: list[str]) -> None:
        self.log, self.most = log, 0
        self._copies: dict[str, list[Callable[[], None]]] = {"out": [], "back": []}  # that have begun
        self._ended = {"out": 0, "back": 0}
        self._present: list[weakref.ref[Tensor]] = []

    def to_host(self, x: Tensor) -> tuple[list[Tensor], Event]:
        copy: list[Tensor] = []
        source = self._seen(x)

        def end() -> None:
            there = source()
            if there is not None:  # otherwise nothing was copied
                copy.append(there.clone())

        return copy, self._begin("out", end)

    def to_device(self, copies: Sequence[list[Tensor]], after: Event) -> tuple[list[Tensor], Event]:
        self.log.append("fetch")
        self.wait(after)
        found = [torch.full_like(x, torch.nan) for (x,) in copies]
        targets = [(self._seen(x), copy) for x, (copy,) in zip(found, copies, strict=True)]

        def end() -> None:
            for target, copy in targets:
                if (x := target()) is not None:
                    x.copy_(copy)

        return found, self._begin("back", end)

    def wait(self, event: Event) -> None:
        stream, number = event
        for end in self._copies[stream][self._ended[stream] : number]:
            self._ended[stream] += 1
            end()

    def _begin(self, stream: str, end: Callable[[], None]) -> Event:
        self._copies[stream].append(end)
        return stream, len(self._copies[stream])

    def _seen(self, x: Tensor) -> weakref.ref[Tensor]:
        self._present = [other for other in self._present if other() is not None] + [weakref.ref(x)]
        self.most = max(self.most, len(self._present))
        return weakref.ref(x)


class Layer(nn.Linear):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(4, 4)
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.name)
        return x + super().forward(x.sin())


def test_layers_are_fetched_one_ahead_and_at_most_two_are_on_the_device() -> None:
    log: list[str] = []
    copier = LateCopier(log)
    torch.manual_seed(0)
    layers, inputs = [Layer(str(number), log) for number in range(LAYERS)], torch.randn(3, 2, 4)

    def outputs() -> list[Tensor]:
        log.clear()
        return [nn.Sequential(*layers)(x.requires_grad_()).square().sum() for x in inputs.clone().unbind()]

    weights = [weight for layer in layers for weight in layer.parameters()]
    wanted = [torch.autograd.grad(loss, weights) for loss in outputs()]
    with patch.object(recompute, "copier_for", lambda device: copier):
        apply_activation_checkpointing(layers, "full", offload=True)
        for order in ((0, 1, 2), (2, 0, 1)):  # of the backwards after all forwards
            losses = outputs()
            for number in order:
                log.clear()
                found = torch.autograd.grad(losses[number], weights)
                assert all(map(torch.equal, found, wanted[number]))
                last = ["4"] if number == 2 and order[0] == 2 else ["fetch", "fetch", "4"]
                assert log == [*last, "fetch", "3", "fetch", "2", "fetch", "1", "0"]
    assert copier.most == 2


def test_a_backward_may_be_split_and_what_is_forgotten_is_freed() -> None:
    log: list[str] = []
    copier = LateCopier(log)
    layer, x = Layer("0", log), torch.randn(2, 4, requires_grad=True)
    weight, bias = layer.parameters()
    wanted = torch.autograd.grad(layer(x).square().sum(), [weight, bias])
    with patch.object(recompute, "copier_for", lambda device: copier):
        apply_activation_checkpointing([layer], "full", offload=True)
        loss = layer(x).square().sum()
        (of_weight,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (of_bias,) = torch.autograd.grad(loss, bias)
    assert torch.equal(of_weight, wanted[0]) and torch.equal(of_bias, wanted[1])
    away = recompute.Offload()
    with patch.object(recompute, "copier_for", lambda device: copier):
        saved = away.layer(x.device, first=True)
        packed = saved.pack(torch.ones(1))
        gone = weakref.ref(packed)
        del packed
        assert gone() is None and saved.unpack(saved.pack(torch.ones(1))) == 1
