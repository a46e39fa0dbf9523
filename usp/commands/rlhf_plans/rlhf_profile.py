"""python -m usp rlhf-profile: measure the calls of an RLHF step on this machine, for rlhf-plan --profile."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from usp.commands.flags import output_problem, parse
from usp.config import MODEL_HELP, one_of, token_count
from usp.rlhf.algorithms.registry import ALGORITHMS
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, choose_device, process_group, stay_on_loopback

if TYPE_CHECKING:
    from usp.cost.profile.parts import Part
    from usp.cost.profile.profile import Point, Sizes


@dataclass(frozen=True)
class RlhfProfileConfig:
    """Measure generation, inference and training of models on this machine, in every layout of the launched ranks, and
    write them to a file for rlhf-plan --profile. Models are as shallow as --layers says, with random weights.

    For example, on 8 ranks: torchrun --nproc-per-node 8 -m usp rlhf-profile --actor qwen3-8b --out profile.json
    """

    out: Annotated[Path, arg(metavar="FILE.json")] = Path("rlhf-profile.json")
    """Profile to write. What an existing one has is kept, and not measured again."""
    actor: Annotated[str, arg(metavar="PRESET|PATH", help=f"Model to train. {MODEL_HELP}")] = "tiny"
    critic: Annotated[str, arg(metavar="PRESET|PATH", help_behavior_hint="(default: the actor)")] = ""
    """Model whose size the critic and the reward model have."""
    algorithm: Annotated[str, one_of(tuple(name for name, of in ALGORITHMS.items() if of.data == "prompts"))] = "ppo"
    """Training algorithm, whose calls are measured."""
    layers: Annotated[str, arg(metavar="N,N")] = "1,2"
    """Depths to measure; a time is linear in the depth between and beyond them."""
    samples: Annotated[str, arg(metavar="N,N,...")] = "8,32"
    """Samples of a call or a mini-batch, over all ranks; a time is linear in them between and beyond these."""
    tokens: Annotated[str, arg(metavar="N,N,...")] = "256,1K"
    """Tokens of a sample; a time is linear in them between and beyond these."""
    response_share: float = 0.5
    """Fraction of a sample's tokens that is the response, whose log-probabilities are computed."""
    max_sp: int = 8
    """Highest ring x ulysses degree."""
    max_tp: int = 8
    """Highest tp degree."""
    max_pp: int = 1
    """Highest pp degree."""
    zero: Annotated[str, arg(metavar="N,N,...")] = "0,1,3"
    """ZeRO stages of inference and training."""
    rounds: int = 12
    """Turns of each measurement."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type. auto: CUDA if available, otherwise CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward. auto: bfloat16 on CUDA, float32 on the CPU."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Measure on every rank that torchrun launched, and write the file on rank 0."""
    asked = parse(argv, RlhfProfileConfig, prog)
    layers, samples, tokens, zero = (_numbers(asked, name) for name in ("layers", "samples", "tokens", "zero"))
    least = {"max_sp": 1, "max_tp": 1, "max_pp": 1, "rounds": 3}
    problems = [output_problem("--out", asked.out)]
    problems += [f"--{n.replace('_', '-')} must be at least {m}" for n, m in least.items() if getattr(asked, n) < m]
    problems += ["--response-share must be above 0 and below 1"] if not 0 < asked.response_share < 1 else []
    problems += [f"--zero = {asked.zero} must be stages from 0 to 3"] if not {*zero} <= {0, 1, 2, 3} else []
    if min(*layers, *samples, *tokens) < 1:
        problems.append("--layers, --samples and --tokens must be at least 1")
    if found := [problem for problem in problems if problem]:
        raise ConfigurationError("\n".join(found))

    import torch
    import torch.distributed as dist

    from parallel import ProcessGroups
    from usp.cost.calls.workload import Workload
    from usp.cost.profile.measure_moves import measure_moves, pairs_of
    from usp.cost.profile.measure_profile import measure_profile
    from usp.cost.profile.measure_step import measure_step
    from usp.cost.profile.profile import Sizes
    from usp.cost.time.compute import dtype_name
    from usp.cost.time.rounds import Rounds
    from usp.hf.models import with_layers
    from usp.train.claim import from_first_rank

    launch = Launch.from_environment(environ)
    stay_on_loopback(launch, environ)
    device = choose_device(asked.device, launch)
    fast = device.type == "cuda"
    dtype = torch.bfloat16 if asked.dtype == "bfloat16" or (asked.dtype == "auto" and fast) else torch.float32
    sizes = Sizes(layers, samples, tokens, tokens, asked.response_share)
    graph, calls = _calls(asked, dtype, max(samples), zero, launch)
    name = torch.cuda.get_device_name(device) if fast else "CPU"

    def progress(doing: str) -> None:
        if launch.rank == 0:
            print(doing, file=sys.stderr, flush=True)

    with process_group(launch, device):
        groups = ProcessGroups()
        rounds = Rounds(device, asked.rounds, 0.02, crowded=not fast)
        known = from_first_rank(lambda: _known(asked.out, name, dtype_name(dtype), launch.world_size, sizes))
        profile = measure_profile(calls, sizes, rounds, name, groups, progress, known)
        trained = [one for one in calls if one.call.kind == "train_step"]
        pairs = pairs_of(one.layout for one in trained if one.layout.dims.pp <= max(layers))
        if rounds.crowded and pairs:  # elsewhere, links do the work, and the hardware's rates serve
            progress(f"{len(pairs)} reallocations")
            spec = replace(trained[0].spec, config=with_layers(trained[0].spec.config, max(layers)))
            profile = replace(profile, moves=measure_moves(spec, pairs, groups, device))
        response = max(1, round(max(tokens) * asked.response_share))
        prompts = max(8, -(-max(samples) // graph.group_size))
        workload = Workload.of(prompts, graph.group_size, max(tokens) - response, (response,))
        profile = replace(profile, step=measure_step(graph, workload, groups, device))
        if launch.rank == 0:
            profile.save(asked.out)
            print(f"{asked.out}: {len(profile.points)} parts of calls on up to {profile.ranks} ranks")
        dist.barrier()


def _known(out: Path, device: str, dtype: str, ranks: int, sizes: Sizes) -> Mapping[Part, tuple[Point, ...]]:
    """Return what an existing file has.

    Raises:
        ValueError: if it is no profile, or was measured otherwise.
    """
    from usp.cost.profile.profile import Profile

    if not out.exists():
        return {}
    found = Profile.load(out)
    if (found.device, found.dtype, found.ranks, found.sizes) != (device, dtype, ranks, sizes):
        had = {"layers": found.sizes.layers, "samples": found.sizes.samples, "tokens": found.sizes.tokens}
        flags = " ".join(f"--{flag} {','.join(map(str, values))}" for flag, values in had.items())
        raise ValueError(
            f"--out = {out} exists, and was measured by {found.ranks} ranks on {found.device} in {found.dtype}, with "
            f"{flags} --response-share {found.sizes.counted}: name another file, or remove it"
        )
    return found.points


def _calls(asked: RlhfProfileConfig, dtype, samples: int, zero: Sequence[int], launch: Launch):
    """Return the graph of the algorithm, and its calls in every layout of the launched ranks."""
    from usp.cost.profile.measure_profile import Asked
    from usp.cost.rlhf.described import described_graph
    from usp.cost.rlhf.options import ModelLimits, OptionSpace, options
    from usp.hf.models import load_model_config, model_facts
    from usp.rlhf.roles.role_spec import RoleSpec
    from usp.train.engines.base import AdamW

    graph = described_graph(
        asked.algorithm, "", group_size=0, max_new_tokens=64, staleness=0, function=not asked.critic
    )
    specs, limits = {}, {}
    for role in graph.roles:
        scalar = role in ("critic", "reward")
        source = (asked.critic if scalar else "") or asked.actor
        config = load_model_config(source, "scalar" if scalar else "lm", new_head=True, weights=False)
        specs[role] = RoleSpec(role, source, config, dtype=dtype, optimizer=AdamW(0.0))
        facts = model_facts(source, config)
        limits[role] = ModelLimits(facts.num_heads, facts.num_kv_heads, len(facts.windows))
    most_mini_batches = max(getattr(call.work, "mini_batches", 1) for call in graph.calls)
    space = OptionSpace(
        launch.world_size,
        launch.local_world_size,
        2 * samples * most_mini_batches,
        max_tp=asked.max_tp,
        max_sequence=asked.max_sp,
        zero=tuple(zero),
        recompute=(("none", False), ("full", False)),  # as searches do
        limits=limits,
    )
    asked_calls = [
        Asked(call, specs[call.role], layout)
        for call in graph.calls
        if call.role
        for layout in options(call, space)
        if layout.dims.pp <= asked.max_pp and layout.dims.batch <= samples
    ]
    return graph, asked_calls


def _numbers(asked: RlhfProfileConfig, name: str) -> tuple[int, ...]:
    text = getattr(asked, name)
    try:
        return tuple(sorted({token_count(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigurationError(f"--{name} = {text}: {error}") from None
