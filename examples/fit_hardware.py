"""A run beside its prediction, and the hardware file by which the run's step is predicted to take what it took.

python -m examples.fit_hardware RUN/config.yaml --world-size 8 --hardware h100 --against RUN --write-hardware mine.json

Without --write-hardware the run is only compared. A run of one configuration tells few numbers apart. The duration of
its steps gives one, a factor of all compute. Traces of some steps (--profile) also tell the proportion of matrix
products, attention and memory-bound operators; on a CPU also the host's time, a factor of all links, and how long ranks
wait for each other: a collective takes as long as on the rank that comes to it last. A GPU's links and launches, and
copies to the host, keep the rates of the file that the fit begins with.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import yaml
from rich.console import Console
from tyro.conf import arg

from usp.commands.flags import (
    DataFlags,
    JobFlags,
    Node,
    as_kind,
    check,
    check_world_size,
    data_of,
    output_problem,
    parse,
    terms_of,
)
from usp.config import UNPREDICTED, TrainConfig
from usp.model.facts import ModelFacts
from usp.parallel.cluster.hardware import Curve, Hardware, hardware_from_mapping, hardware_values, load_hardware
from usp.planning.corrections import scaled
from usp.planning.step_report import StepReport, render, report_json, step_report
from usp.predict.job import Data
from usp.run.failures import ConfigurationError
from usp.run.launch import leave
from usp.run.metrics import METRICS_FILE, parse_steps, seconds
from usp.run.tables import GIB, Grid

PRODUCTS, ATTENTION, MEMORY = "matrix products", "attention", "memory-bound operators"  # as in `StepTime.parts`
LAUNCHES, WAITS, MESSAGES, STEP = "kernel launches", "exposed waiting for other ranks", "messages", "step"
_COMPONENTS = (PRODUCTS, ATTENTION, MEMORY, MESSAGES, LAUNCHES, WAITS)
RATES = dict(zip(_COMPONENTS, ("products", "attention", "memory", "messages", "launches", "waits"), strict=True))
FIRST = {LAUNCHES: ("launch_seconds", 1e-5), WAITS: ("wait_fraction", 0.1)}  # on a CPU, where the fit begins
FIRST_STEPS, FEWEST_STEPS = 3, 10  # of a run: those that allocate, connect and compile; those of a median
TRACES = 8  # to read
LEAST = 0.05  # part of a step that a component takes if its rate can be told from that of the others
ROUNDS, TOLERANCE = 100, 1e-4  # of the fit, which converges by a constant factor in each round
_KERNELS = {ATTENTION: r"flash|fmha|cudnn\w*sdpa", PRODUCTS: r"gemm|nvjet", MEMORY: r"^(?!nccl)"}  # by names on a GPU
_ON_CPU = {  # by names of torch's operators
    ATTENTION: r"^aten::_(scaled_dot_product|flash)_\w*attention\w*$",
    PRODUCTS: r"^aten::(addmm|mm|bmm|baddbmm|_grouped_mm|_scaled_mm)$",
    MEMORY: r"^aten::",
    LAUNCHES: r"^autograd::|^step \d+$",
}


@dataclass(frozen=True)
class FitConfig(JobFlags, DataFlags, TrainConfig):
    """Compare the predicted step of a configuration (`usp time`) with a run of it, and write the hardware file by which
    the step is predicted to take what the run took.

    A configuration file may be given as the first argument, without --config.
    """

    world_size: int = 0
    """Number of devices."""
    hardware: Node = "h100"
    against: Annotated[str, arg(metavar="RUN")] = ""
    """Folder of a run of train.py."""
    write_hardware: Annotated[str, arg(metavar="FILE.json", help_behavior_hint="(optional)")] = ""
    """Write --hardware with rates of compute by the steps of --against, and by its trace if it has one (--profile)."""
    json: bool = False
    """Print JSON and nothing else, with times in seconds and sizes in bytes."""


def main(argv: Sequence[str]) -> int:
    """Print the prediction beside the run and write the file, if any; return 0, or 1 after printing what is wrong."""
    try:
        fit(argv)
    except BrokenPipeError:  # the reader of the output, such as `head`, has gone
        pass
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fit(argv: Sequence[str]) -> None:
    """Print the prediction beside the run, and write a file that is asked for; raise ValueError for what is wrong."""
    program, without = "python -m examples.fit_hardware", UNPREDICTED - {"train_tokens"}
    asked = parse(argv, FitConfig, program, leading_config=True, without=without)
    check_world_size(asked.world_size)
    file = Path(asked.write_hardware).expanduser() if asked.write_hardware else None
    folder = Path(asked.against).expanduser()
    check(
        output_problem("--write-hardware", file, ".json"),
        None if asked.against else "--against is missing: give the folder of a run of train.py",
    )
    config = replace(as_kind(asked, TrainConfig), hardware=TrainConfig.hardware, train_tokens=0)
    run, terms = measured(folder), terms_of(asked)

    def data(facts: ModelFacts) -> Data:
        found = data_of(asked, facts)
        if run.document_tokens and not found.documents:
            found = replace(found, documents=(even_documents(run.document_tokens, config.seq_len),))
        return found

    name = FitConfig.hardware if asked.hardware == "auto" else asked.hardware  # auto: of a file
    report = step_report(config, asked.world_size, load_hardware(name), data)
    if asked.json:
        print(json.dumps({**report_json(report, terms), "measured": vars(run)}, indent=2))
    else:
        Console().print(render(report, terms), comparison(report, run).table())
    if file is None:
        return
    values, words = fitted(report, hardware_values(name), run, folder)
    file.write_text(json.dumps(values, indent=1) + "\n")
    if not asked.json:
        print(f"written: {file}: {words}", file=sys.stderr)


@dataclass(frozen=True)
class Measured:
    """What a run recorded: seconds of its median step without the waiting for data, MFU, rank 0's peak memory, and the
    tokens of the document that its average token is in."""

    steps: int
    seconds: float
    mfu: float | None  # None where the run's device has no known peak
    memory_bytes: int
    document_tokens: float | None = None


def measured(folder: Path) -> Measured:
    """Read the metrics of a run of train.py; raise ConfigurationError if it has none after the first steps."""
    path = folder / METRICS_FILE
    if not path.exists():
        raise ConfigurationError(f"--against = {folder} holds no {METRICS_FILE}: give the folder of a run of train.py")
    lines, config = path.read_text().splitlines(), folder / "config.yaml"
    if len(lines) <= FIRST_STEPS:
        raise ConfigurationError(
            f"--against = {folder} has {len(lines)} steps, and the first {FIRST_STEPS} are left out because they "
            "allocate and connect: let it run longer"
        )
    try:
        records = [json.loads(line) for line in lines][FIRST_STEPS:]
        profiled = yaml.safe_load(config.read_text())["profile"] if config.exists() else ""
        traced = parse_steps(profiled, sys.maxsize)  # which takes time
        records = [record for record in records if record.get("step") not in traced] or records
        known = [record["mfu"] for record in records if record["mfu"] is not None]
        took = median(record["seconds"] - record.get("data_seconds", 0.0) for record in records)
        memory_bytes = max(record["memory_bytes"] for record in records)
        documents = [record["document_tokens"] for record in records if record.get("document_tokens")]
        mfu, tokens = (median(each) if each else None for each in (known, documents))
        return Measured(len(records), took, mfu, memory_bytes, tokens)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--against = {folder}: {path} is no log of train.py: {error!r}") from error


def even_documents(tokens: float, seq_len: int) -> int:
    """Return the length of documents that fill a sequence, the last one cut, where the average token's has `tokens`."""
    number = max(1, int(seq_len / tokens))  # of uncut ones
    rest = seq_len * max(0.0, (number + 1) * tokens - seq_len)
    return min(seq_len, round((seq_len + math.sqrt(rest / number)) / (number + 1)))


def comparison(report: StepReport, run: Measured) -> Grid:
    """Return the table of a prediction beside a run."""
    compared: list[tuple[str, float, float | None, Callable[[float], str]]] = [
        ("step", report.time.total, run.seconds, seconds),
        ("peak memory, GiB", report.memory.peak.total / GIB, run.memory_bytes / GIB, "{:.2f}".format),
        ("MFU", report.time.mfu, run.mfu, "{:.1%}".format),
    ]
    rows = ((name, text(ours), text(its), f"{ours / its - 1:+.1%}") for name, ours, its, text in compared if its)
    documents = f", documents of {run.document_tokens:,.0f} tokens" if run.document_tokens else ""
    title = f"Prediction and run (median of {run.steps} steps{documents})"
    return Grid(title, ("", "predicted", "measured", "difference"), tuple(rows))


def fitted(report: StepReport, values: Mapping[str, Any], run: Measured, where: Path) -> tuple[dict[str, Any], str]:
    """Fit the rates in the `values` of a hardware file so that a step is predicted to take what it took in a run, and
    its parts in proportion to those of traces in the run's folder; return the new values, and by how much they differ.
    Raise ConfigurationError if the run does not determine the rates."""
    traced = traced_parts(where) if report.job.dims.pp == 1 else {}  # stages differ
    if run.steps < FEWEST_STEPS:
        raise ConfigurationError(
            f"--write-hardware: {where} has {run.steps} steps after the first ones, and a median of at least "
            f"{FEWEST_STEPS} determines rates: let it run longer"
        )
    per_traced = run.seconds / traced.pop(STEP, 1.0)
    known = {name: per_traced * traced.pop(name) for name in (LAUNCHES, WAITS, MESSAGES) if name in traced}  # seconds
    whole = sum(traced.values())
    told = {name: took / whole for name, took in traced.items() if took > LEAST * whole}
    factors = dict.fromkeys((PRODUCTS, ATTENTION, MEMORY), 1.0)
    if report.job.config.compile:
        known.pop(LAUNCHES, None)
    for name, (key, first) in FIRST.items():
        if name in known:
            values = {**values, key: (values.get(key) or first) if known[name] else 0.0}
    hardware = hardware_from_mapping(values, str(where))
    for _ in range(ROUNDS):
        time = replace(report, hardware=scaled_by(hardware, factors)).time
        parts = {name: time.parts[name] for name in (PRODUCTS, ATTENTION, MEMORY)}
        parts[MEMORY] += time.parts["optimizer"]
        rest = {name: time.parts.get(name, 0.0) for name in (LAUNCHES, WAITS)}
        rest[MESSAGES] = time.total - sum((parts | rest).values())
        known = {name: took for name, took in known.items() if took > 0 and rest[name] > 0}
        compute = run.seconds - sum((rest | known).values())
        if compute <= LEAST * run.seconds:
            raise ConfigurationError(
                f"--write-hardware: by the rates of --hardware, what {where} does besides compute takes all of its "
                f"{run.seconds:.3g} s: calibrate the machine, or give a run that computes more and communicates less"
            )
        others = sum(took for name, took in parts.items() if name not in told) / max(1 - sum(told.values()), TOLERANCE)
        changes = {name: (parts[name] / told[name] if name in told else others) / compute for name in parts}
        changes |= {name: rest[name] / took for name, took in known.items()}
        factors = {name: factors.get(name, 1.0) * change for name, change in changes.items()}
        if max(abs(change - 1) for change in changes.values()) < TOLERANCE:
            break
    else:
        raise ConfigurationError(
            f"--write-hardware: no rates of compute give the step of {where}, which waits for its host or its messages"
        )
    before, text = values.get("source", []), ", ".join(f"{name} {factors[name]:.2f}" for name in parts)
    source = [f"rates by the steps of {where}", *([before] if isinstance(before, str) else before)]
    found = {**with_rates(values, scaled_by(hardware, factors)), "source": source}
    launches = f"take {1e6 * found['launch_seconds']:.3g} us each" if LAUNCHES in known else "keep theirs"
    links = f"links {factors[MESSAGES]:.2f}" if MESSAGES in known else "links keep theirs"
    links += f", waiting for other ranks {found['wait_fraction']:.0%} of the compute" if WAITS in known else ""
    return found, f"times the rates of before: {text}; launches {launches}, {links}, copies to the host keep theirs"


def scaled_by(hardware: Hardware, factors: Mapping[str, float]) -> Hardware:
    """Return hardware with the rates of the components times their factors."""
    return scaled(hardware, **{RATES[name]: factor for name, factor in factors.items()})


def with_rates(values: Mapping[str, Any], hardware: Hardware) -> dict[str, Any]:
    """Return the values of a hardware file with the rates of hardware. An efficiency above 1 raises the peaks."""
    attention = {name: {kind: of for kind, of in vars(each).items() if of} for name, each in hardware.attention.items()}
    shares = [hardware.matmul, *(curve for kernel in attention.values() for curve in kernel.values())]
    above = max(1.0, *(share for curve in shares for _, share in curve))

    def below(curve: Curve) -> list[list[float]]:
        return [[size, share / above] for size, share in curve]

    rates = {name: {kind: below(of) for kind, of in kernel.items()} for name, kernel in attention.items()}
    tiers = ({name: of for name, of in asdict(tier).items() if of != math.inf} for tier in hardware.tiers)
    same = ("memory_bytes_per_second", "launch_seconds", "wait_fraction")
    return {
        **values,
        **{name: getattr(hardware, name) for name in same},
        "peak_flops": {dtype: above * peak for dtype, peak in hardware.peak_flops.items()},
        "tiers": [*tiers],
        "efficiency": {**values["efficiency"], "matmul": below(hardware.matmul), "attention": rates},
    }


def traced_parts(folder: Path) -> dict[str, float]:
    """Return the seconds of a step and of its parts as means over the first ranks whose traces are in the folder of a
    run, empty without any; those of attention as with the documents of the run's median step."""
    paths = [folder / "profile" / f"rank-{rank}.json.gz" for rank in range(TRACES)]
    records = map(json.loads, (folder / METRICS_FILE).read_text().splitlines())
    documents = {f"step {record.get('step')}": record.get("document_tokens") or 1.0 for record in records}
    found = [_parts_of_trace(path, documents) for path in paths if path.exists()]
    if not found or not all(parts for parts, _ in found):
        return {}
    took = {name: mean(parts[name] for parts, _ in found) for name in found[0][0]}
    if MESSAGES in took and len(found) > 1:
        sums = defaultdict[int, float](float)
        for each in zip(*(collectives for _, collectives in found), strict=False):
            sums[each[0][0]] += min(seconds for _, seconds in each)
        least = min(took[MESSAGES], median(sums.values()) if sums else 0.0)
        took |= {MESSAGES: least, WAITS: took[MESSAGES] - least}
    return took


def _parts_of_trace(path: Path, documents: Mapping[str, float]) -> tuple[dict[str, float], list[tuple[int, float]]]:
    """Return the seconds of a rank's parts, and (step, seconds) of each collective by gloo, ordered by its name.
    documents: their tokens by step."""
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event.get("dur")]
    steps = [e for e in events if e.get("cat") == "user_annotation" and re.fullmatch(r"step \d+", e["name"])]
    steps.sort(key=itemgetter("ts"))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kinds, starts = _KERNELS if kernels else _ON_CPU, [step["ts"] for step in steps]
    sent = sorted((e["name"], e["ts"], e["dur"]) for e in events if e["name"].startswith("gloo:"))
    found = [dict.fromkeys((*kinds, ""), 0.0) for _ in range(1 + len(steps))]  # first what comes before all steps
    calls = list[tuple[Any, float, str]]()  # outer ones: thread, end, kind
    events = kernels or [*steps, *(event for event in events if event.get("cat") == "cpu_op")]
    for event in sorted(events, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        while calls and (calls[-1][0] != event["tid"] or calls[-1][1] <= event["ts"]):
            calls.pop()
        outer, parts = calls[-1][2] if calls else "", found[bisect(starts, event["ts"])]
        named = (name for name, pattern in kinds.items() if re.search(pattern, event["name"]))
        kind = outer if outer in (PRODUCTS, ATTENTION) else next(named, "")
        parts[kind] += event["dur"]
        parts[outer] -= event["dur"]
        calls.append((event["tid"], event["ts"] + event["dur"], kind))
    if not steps:
        return {}, []
    usual = median(documents.values())
    for step, parts in zip(steps, found[1:], strict=True):
        more = (usual / documents.get(step["name"], usual) - 1) * parts[ATTENTION]
        parts[ATTENTION] += more
        step["dur"] += more
    took = {name: median(parts[name] for parts in found[1:]) for name in kinds}
    took[STEP] = median(step["dur"] for step in steps)
    if LAUNCHES in took:
        took[MESSAGES] = max(0.0, took[STEP] - sum(took[name] for name in kinds))
    return {name: 1e-6 * each for name, each in took.items()}, [(bisect(starts, at), 1e-6 * dur) for _, at, dur in sent]


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
