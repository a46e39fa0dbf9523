"""Every figure that is expected, written down before any GPU had run: value, unit, source and tolerance.

Exact figures are bounds on errors and counts that are wrong outside of them; they hold for a rehearsal as well. All
others are of an H200, and out of tolerance says no more than that something is to be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.checks import Check

DATASHEET = "NVIDIA H200 datasheet"
NODE = "parallel/cluster/nodes/h200.json"
ESTIMATE = "estimate"
HALF, SINGLE = "rounding of bfloat16, as the tests allow", "rounding of float32, as the tests allow"


@dataclass(frozen=True)
class Expected:
    """A figure before it is measured. It is right between `least` and `most` times `value`.

    exact: a correctness figure. tiny: its value in a rehearsal, which is in float32; None for the same.
    """

    value: float
    unit: str
    source: str
    least: float = 0.75
    most: float = 1.35
    exact: bool = False
    tiny: float | None = None


def check_of(name: str, value: float, *, tiny: bool) -> Check:
    """Return a figure beside what is expected of it; of a time or a rate in a rehearsal, and of an unknown one, nothing
    is."""
    found = EXPECTED.get(name)
    if found is None:
        return Check(name, value)
    if tiny and not found.exact:
        return Check(name, value, found.unit)
    wanted = found.tiny if tiny and found.tiny is not None else found.value
    return Check(name, value, found.unit, wanted, found.least, found.most)


def error(value: float, source: str = HALF, tiny: float | None = None) -> Expected:
    """An error that is at most `value`."""
    return Expected(value, "", source, 0.0, 1.0, exact=True, tiny=tiny)


MASKS = (
    "causal", "full", "documents", "one-token documents", "window", "band", "window in documents", "softcap", "sinks",
    "lse with a gradient",
)  # fmt: skip
KERNELS = ("reference", "sdpa", "aten-flash", "efficient", "cudnn", "flash-attn-2", "flash-attn-3", "flash-attn-4")
RINGS = ("zigzag, documents", "striped, window", "contiguous, sinks")
FA2 = ((298, 291, 362, 291), (333, 318, 370, 318), (335, 322, 370, 322), (335, 322))
RATES = {  # TFLOP/s at 2K, 8K, 32K, 128K: causal forward and backward, and without a mask
    "aten-flash": (FA2, NODE),
    "flash-attn-2": (FA2, NODE),
    "flash-attn-3": (((521, 501, 625, 501), (602, 559, 646, 559), (616, 561, 648, 561), (616, 561)), NODE),
    "flash-attn-4": (((522, 446, 671, 562), (675, 629, 756, 656), (638, 610, 679, 618), (638, 610)), NODE),
    "cudnn": (((534, 402, 660, 519), (655, 526, 701, 562), (619, 528, 622, 543), (619, 528)), NODE),
    "efficient": (((170, 110, 190, 120), (200, 130, 210, 135), (200, 130, 210, 135), (200, 130)), ESTIMATE),
}
LENGTHS = ("2K", "8K", "32K", "128K")


def correctness() -> Iterator[tuple[str, Expected]]:
    yield "a product of ones, of what it is", Expected(1.0, "", "arithmetic", 1.0, 1.0, exact=True)
    for kernel in KERNELS:
        for mask in MASKS:
            yield f"{kernel}, {mask}: error", error(1e-2, tiny=1e-6)
        for ring in RINGS:
            yield f"ring of 4, {ring}, {kernel}: error", error(1e-2, tiny=1e-6)
    yield "merge: error of out", error(1e-6, SINGLE)
    yield "merge: error of lse", error(1e-6, SINGLE)
    measured = "three times what bfloat16 on a CPU differs, rounded up"
    for what in ("engine", "train.py"):
        yield f"{what}: error of the loss in 3 steps", error(2e-3, measured)
        yield f"{what}: error of the gradient norm in 3 steps", error(2e-2, measured)
    for how in ("one by one", "in graphs"):
        yield f"tokens of the CPU, decoded {how}", Expected(1.0, "", "float32 has few ties", 0.98, 1.0, exact=True)
        yield f"first log-probability, float32, decoded {how}: error", error(1e-4, SINGLE)
        yield f"first log-probability, bfloat16, decoded {how}: error", error(5e-2, measured)
    yield "tokens decoded one by one, decoded in graphs", Expected(1.0, "", "the same operators", 0.98, 1.0, exact=True)
    for dtype in ("float32", "bfloat16"):
        yield f"steps replayed, {dtype}", Expected(280, "", "9 prompts of 100 tokens in 4 slots", 0.5, 1.5, exact=True)


def ceilings() -> Iterator[tuple[str, Expected]]:
    for product in ("16384 x 14336 x 4096", "16384 x 4096 x 14336", "16384 x 6144 x 4096", "2048 x 128256 x 4096"):
        yield f"product {product}", Expected(700, "TFLOP/s", NODE, 0.85, 1.15)
    yield "copy on the device, read and written", Expected(4.1, "TB/s", f"{DATASHEET}: 4.8 TB/s, 85% of it", 0.9, 1.12)
    yield "copy to the host", Expected(55, "GB/s", NODE, 0.75, 1.15)
    yield "copy from the host", Expected(55, "GB/s", NODE, 0.75, 1.15)


def attention() -> Iterator[tuple[str, Expected]]:
    columns = [f"{mask}, {{}}, {passed}" for mask in ("causal", "full") for passed in ("forward", "backward")]
    for kernel, (rows, source) in RATES.items():
        for length, row in zip(LENGTHS, rows, strict=True):
            for column, rate in zip(columns, row, strict=False):
                yield f"{kernel}, {column.format(length)}", Expected(rate, "TFLOP/s", source)
    for length, row in zip(LENGTHS, RATES["cudnn"][0], strict=True):
        for passed, rate in zip(("forward", "backward"), row, strict=False):
            name = f"torch's choice, causal, {length}, {passed}"
            yield name, Expected(rate, "TFLOP/s", f"{NODE}, cuDNN; FA2 would have half", 0.45)


def decoding() -> Iterator[tuple[str, Expected]]:
    for slots, length in ((64, "2K"), (8, "16K"), (1, "128K")):
        what = f"decoding {slots} x {length}"
        source = "436 MB of weights and 537 MB of cache at 85% of the bandwidth"
        yield f"{what}, a layer", Expected(240, "us", source, 0.8, 1.5)
        yield f"{what}, layers, of the bandwidth", Expected(0.85, "", source, 0.65, 1.1)
        source = "1.05 GB of head at 85% of the bandwidth, and sampling"
        yield f"{what}, embedding, head and sampling", Expected(450, "us", source, 0.6, 2.5)


def step() -> Iterator[tuple[str, Expected]]:
    layers = "34 to 40% with everything recomputed, which MFU does not count"
    for name, milliseconds, share in (("documents of 8K, 4K and 4K", 400, 37), ("one document of 16K", 435, 38)):
        yield f"first step, {name}", Expected(3, "s", ESTIMATE, 0.1, 4)
        yield f"step, {name}", Expected(milliseconds, "ms", "the MFU below", 0.75, 1.15)
        yield f"MFU, {name}", Expected(share, "%", layers, 0.9, 1.3)
    yield "kernels launched in a step", Expected(1100, "", "about 130 a layer and pass, and the head's chunks", 0.5, 2)
    yield "stops of the host in a step", Expected(10, "", "docs/gpu.md: no dense layer stops the host", 0.0, 1.0)
    yield "the device is busy, of a step", Expected(0.97, "", ESTIMATE, 0.95, 1.2)
    yield "peak memory of a step, of the dry run's", Expected(1.0, "", "the dry run", 0.95, 1.1, exact=True)
    yield "first step with torch.compile", Expected(40, "s", ESTIMATE, 0.1, 2)
    yield "step with torch.compile, of eager", Expected(0.84, "", "elementwise kernels are fused", 0.85, 1.1)
    layers = "about 60 a layer in three passes, 20 of them fused; the head's chunks, FSDP2 and the optimizer"
    yield "kernels launched in a compiled step", Expected(420, "", layers, 0.5, 2)
    yield "peak memory of a compiled step, of the formula's", Expected(1.0, "", "usp.predict.memory", 0.95, 1.1)
    yield "MFU with torch.compile", Expected(44, "%", "the two above", 0.85, 1.2)
    theirs = "transformers with FSDP2"
    yield f"{theirs}, a step", Expected(460, "ms", "the toolkit's, and logits of all tokens in float32", 0.75, 1.4)
    yield f"{theirs}, peak memory", Expected(60, "GiB", "states 29, logits and their gradient 24", 0.7, 1.4)
    yield "the toolkit, peak memory", Expected(32.6, "GiB", "its dry run", 0.95, 1.15)
    yield "the toolkit's step, of transformers'", Expected(0.95, "", "the two steps above", 0.7, 1.1)
    source = f"2.25e15 FLOPs of a forward, twice, and 2.5 times that backward, cuDNN by {NODE}"
    yield "step of one layer, 512K tokens, offloaded", Expected(19, "s", source, 0.75, 1.6)
    yield "peak memory at 512K tokens, of the dry run's", Expected(1.0, "", "the dry run", 0.95, 1.15)


EXPECTED: dict[str, Expected] = {
    name: expected for part in (correctness, ceilings, attention, decoding, step) for name, expected in part()
}
assert all(math.isfinite(expected.value) for expected in EXPECTED.values())
