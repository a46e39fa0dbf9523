"""python -m examples.needle: which needles a model finds in haystacks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from usp.commands.flags import Command, check, output_problem
from usp.fields import token_count
from usp.run.launch import Launch, StopRequest, leave, process_group

from .prompts import NeedleConfig


def run(config: NeedleConfig, launch: Launch, stop: StopRequest, error_file: str | None) -> None:
    """Run the probe on every rank, and print and write its results on rank 0."""
    from usp.hf.models import hide_progress_bars

    from .probe import plot_heat_map, prepare_probe, run_probe

    out = Path(config.out).expanduser()
    check(output_problem("--out", out, ".png"))
    hide_progress_bars()
    prepared = prepare_probe(config, launch)
    writes = launch.rank == 0
    with process_group(launch, prepared.device):
        if writes:
            print(f"{config.model} on {prepared.layout}: {len(prepared.cells)} prompts", flush=True)
        result = run_probe(prepared, say=lambda line: print(line, flush=True) if writes else None)
        if writes:
            print(f"needles found, in percent, by depth and length; {100 * result.score():.1f} of all:")
            Console().print(result.table().table())
            scaled = "" if config.rope_scaling == "none" else f" with {config.rope_scaling}"
            name = "/".join(Path(config.model).parts[-2:]) + scaled
            title = f"{name}: {result.score():.1%} of needles found, {config.samples} in each cell"
            figure = plot_heat_map(result, title, token_count(config.mark) if config.mark else None)
            figure.savefig(out, dpi=130)
            results = out.with_suffix(".json")
            results.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
            print(f"heat map: {out}\nresults: {results}")


main = Command("python -m examples.needle", NeedleConfig, run).main

if __name__ == "__main__":
    leave(main(sys.argv[1:], os.environ))
