"""python -m examples.rlhf_profile: measure the calls of an RLHF step on this machine, for rlhf-plan --profile."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from usp.commands.flags import Node, check, output_problem, parse, token_counts
from usp.config import MODEL_HELP
from usp.fields import AtLeast1, Rule, at_least, one_of, value_violations
from usp.rlhf.algorithms.registry import ALGORITHMS
from usp.run.failures import REFUSED, Ending, end
from usp.run.launch import (
    Launch,
    choose_device,
    hide_import_warnings,
    leave,
    process_group,
    set_library_defaults,
)

if TYPE_CHECKING:
    from usp.planning.corrections import Profile

Share = Annotated[float, Rule(lambda value: 0 < value < 1, "above 0 and below 1")]


@dataclass(frozen=True)
class RlhfProfileConfig:
    """Measure generation, inference and training of models on this machine, in every layout of the launched ranks, and
    write by how much longer each takes than predicted for --hardware to a file for rlhf-plan --profile. Models are as
    shallow as --layers says, with random weights.

    For example, on 8 ranks: torchrun --nproc-per-node 8 -m examples.rlhf_profile --actor qwen3-8b --out profile.json
    """

    out: Annotated[Path, arg(metavar="FILE.json")] = Path("rlhf-profile.json")
    """Profile to write, after each call. What an existing one has is kept, and not measured again."""
    hardware: Node = "h100"
    """Hardware whose predictions are corrected; give it to rlhf-plan as well."""
    actor: Annotated[str, arg(metavar="PRESET|PATH", help=f"Model to train. {MODEL_HELP}")] = "tiny"
    critic: Annotated[str, arg(metavar="PRESET|PATH", help_behavior_hint="(default: the actor)")] = ""
    """Model whose size the critic and the reward model have."""
    algorithm: Annotated[str, one_of(tuple(name for name, of in ALGORITHMS.items() if of.data == "prompts"))] = "ppo"
    """Training algorithm, whose calls are measured."""
    layers: Annotated[str, arg(metavar="N,N")] = "1,2"
    """Depths to measure; by several, a time is linear in the depth."""
    samples: Annotated[str, arg(metavar="N,N,...")] = "8,32"
    """Samples of a call or a mini-batch, over all ranks. The median of all sizes counts."""
    tokens: Annotated[str, arg(metavar="N,N,...")] = "256,1K"
    """Tokens of a sample, or of a prompt that is answered."""
    response_share: Share = 0.5
    """Fraction of a sample's tokens that is the response, whose log-probabilities are computed."""
    max_sp: AtLeast1 = 8
    """Highest ring x ulysses degree."""
    max_tp: AtLeast1 = 8
    """Highest tp degree."""
    max_pp: AtLeast1 = 1
    """Highest pp degree."""
    zero: Annotated[str, arg(metavar="N,N,...")] = "0,1,3"
    """ZeRO stages of inference and training."""
    rounds: Annotated[int, at_least(3)] = 12
    """Turns of each measurement."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type. auto: CUDA if available, otherwise CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward. auto: bfloat16 on CUDA, float32 on the CPU."""


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Measure; return 0, or 1 after printing why not. Under torchrun, a failure ends the process, as `python -m usp`.

    Args:
        environ: what torchrun says about this rank.
    """
    hide_import_warnings()
    try:
        measure(argv, environ)
    except (ValueError, OSError) as error:
        launch = Launch.from_environment(environ)
        if launch.rendezvous:
            leave(end(Ending(f"error: {error}", REFUSED), launch, environ.get("TORCHELASTIC_ERROR_FILE")))
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def measure(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Measure on every rank that torchrun launched, and write the file on rank 0."""
    asked = parse(argv, RlhfProfileConfig, "python -m examples.rlhf_profile")
    names = ("layers", "samples", "tokens", "zero")
    layers, samples, tokens, zero = (tuple(sorted({*token_counts(f"--{n}", getattr(asked, n))})) for n in names)
    check(
        output_problem("--out", asked.out),
        *value_violations(asked).values(),
        None if {*zero} <= {0, 1, 2, 3} else f"--zero = {asked.zero} must be stages from 0 to 3",
        "--layers, --samples and --tokens must be at least 1" if min(*layers, *samples, *tokens) < 1 else None,
    )

    import torch
    import torch.distributed as dist

    from usp.data.store import write_json
    from usp.parallel import ProcessGroups, load_hardware
    from usp.planning.corrections import VERSION, Corrections, Profile
    from usp.predict.compute import dtype_name
    from usp.predict.rounds import Rounds
    from usp.train.checkpoints import from_first_rank

    from .measuring import Measuring, Sizes

    launch = Launch.from_environment(environ)
    set_library_defaults(launch, environ)
    device = choose_device(asked.device, launch)
    fast = device.type == "cuda"
    dtype = torch.bfloat16 if asked.dtype == "bfloat16" or (asked.dtype == "auto" and fast) else torch.float32
    sizes, hardware = Sizes(layers, samples, tokens, asked.response_share), load_hardware(asked.hardware)
    calls = _calls(asked, dtype, max(samples), zero, launch)
    name = torch.cuda.get_device_name(device) if fast else "CPU"

    def progress(doing: str) -> None:
        if launch.rank == 0:
            print(doing, file=sys.stderr, flush=True)

    with process_group(launch, device):
        measuring = Measuring(sizes, hardware, Rounds(device, asked.rounds, 0.02), ProcessGroups())
        made = {"version": VERSION, "device": name, "dtype": dtype_name(dtype), "ranks": launch.world_size}
        made |= {"actor": asked.actor, "critic": asked.critic, "hardware": hardware.name}
        made |= {name: [*of] if isinstance(of, tuple) else of for name, of in asdict(sizes).items()}
        known = from_first_rank(lambda: _known(asked.out, Profile(made, Corrections())))

        def keep(found: Corrections) -> None:
            if launch.rank == 0:
                write_json(asked.out, {**made, "factors": found.factors})

        found = measuring.corrections(calls, known.corrections, progress, keep)
        if launch.rank == 0:
            print(f"{asked.out}: {len(found.factors)} calls on up to {launch.world_size} ranks")
        dist.barrier()


def _known(out: Path, nothing: Profile) -> Profile:
    """Return what an existing file has, or `nothing`; raise ValueError if it has none, or was measured otherwise."""
    if not out.exists():
        return nothing
    had = nothing.load(out, nothing.made["hardware"])
    if differs := [f"{name} {had.made.get(name)}" for name, now in nothing.made.items() if had.made.get(name) != now]:
        raise ValueError(
            f"--out = {out} exists, and was made with {', '.join(differs)}: name another file, or remove it"
        )
    return had


def _calls(asked: RlhfProfileConfig, dtype, samples: int, zero: Sequence[int], launch: Launch):
    """Return the calls of the algorithm in every layout of the launched ranks."""
    from usp.optimizers import AdamW
    from usp.planning.rlhf_question import described_graph, model_shapes, role_config
    from usp.planning.rlhf_search import OptionSpace, options
    from usp.rlhf.roles.role_model import RoleSpec

    from .measuring import Asked

    graph = described_graph(
        asked.algorithm, "", group_size=0, max_new_tokens=64, staleness=0, function=not asked.critic
    )
    sources = {role: (role in ("critic", "reward") and asked.critic) or asked.actor for role in graph.roles}
    specs = {
        role: RoleSpec(role, source, role_config(role, source), dtype=dtype, optimizer=AdamW(0.0))
        for role, source in sources.items()
    }
    shapes = model_shapes({role: (spec.source, spec.config) for role, spec in specs.items()})
    most_mini_batches = max(getattr(call.work, "mini_batches", 1) for call in graph.calls)
    space = OptionSpace(
        launch.world_size,
        launch.local_world_size,
        2 * samples * most_mini_batches,
        max_tp=asked.max_tp,
        max_sequence=asked.max_sp,
        zero=tuple(zero),
        recompute=(("none", False), ("full", False)),  # as searches do
        models={role: shape.facts for role, shape in shapes.items()},
    )
    return [
        Asked(call, specs[call.role], layout)
        for call in graph.calls
        if call.role
        for layout in options(call, space)
        if layout.dims.pp <= asked.max_pp and layout.dims.batch <= samples
    ]


if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))
