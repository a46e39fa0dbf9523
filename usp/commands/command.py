"""A program that torchrun starts on every rank: launch, parse the flags, run, and end with one message if it fails."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from usp.run.failures import INTERRUPTED, end, ending_of
from usp.run.launch import Launch, meet, stay_on_loopback
from usp.run.orphans import end_with_launcher
from usp.run.signals import StopRequest

from .flags import parse


@dataclass(frozen=True)
class Command:
    """A program that torchrun starts on every rank.

    Attributes:
        prog: program name in the usage message.
        config: dataclass of its flags.
        load: imports and returns the function that runs a configuration; called once the flags are known to be valid,
            because importing it takes seconds. It gets the configuration, the launch, the stop request, and torchrun's
            error file.
    """

    prog: str
    config: type
    load: Callable[[], Callable[[Any, Launch, StopRequest, str | None], None]]

    def main(self, argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
        """Run the program on this rank of the launch that `environ` describes, and return the exit code."""
        launch = Launch.from_environment(environ)
        end_with_launcher(launch)
        launch = meet(launch)
        stay_on_loopback(launch, environ)
        environ.setdefault("LOCAL_RANK", str(launch.local_rank))  # DeepSpeed reads it even without a launcher
        stop, error_file = StopRequest(), environ.get("TORCHELASTIC_ERROR_FILE")
        try:
            config: Any = parse(argv, self.config, self.prog, show_help=launch.rank == 0)
            run = self.load()
            with stop.listening():
                run(config, launch, stop, error_file)
        except (Exception, KeyboardInterrupt) as error:
            try:
                return end(ending_of(error, launch.rank), launch, error_file, asked_to_stop=stop.requested)
            except KeyboardInterrupt:  # while waiting for the launcher
                return INTERRUPTED
        return 0
