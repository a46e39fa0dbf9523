"""The endless sequence of global batches, as row numbers: the same for any number of ranks, resumed at any row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .mixture import MixedRows
from .packing import PackedRows

Rows = PackedRows | MixedRows


class BatchStream:
    """A place in the sequence of global batches of `rows` rows of `packed`.

    next_row: the first row of the next batch.
    """

    def __init__(self, packed: Rows, rows: int) -> None:
        self.packed, self.rows = packed, rows
        self.next_row = 0

    @property
    def epoch(self) -> float:
        """Epochs read so far, with the part of the current one."""
        return self.next_row / self.packed.per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume after the batches read so far, as JSON values."""
        return {
            "row": self.next_row,
            "epoch": self.next_row // self.packed.per_epoch,
            "seq_len": self.packed.seq_len,
            "seed": self.packed.seed,
            "data": self.packed.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any], other_data: bool = False) -> None:
        """Resume from `state`; the number of rows in a batch may differ from that of the stream that saved it.

        other_data: accept other data, another tokenizer and another seq_len than those of `state`, and begin the
            epoch after the one that was left.

        Raises:
            ValueError: naming all of seq_len, seed and data that differ; the stream is unchanged.
        """
        differing = {key: here for key, here in self.state_dict().items() if key in _IDENTITY and state[key] != here}
        if other_data and differing:
            self.next_row = (state["epoch"] + 1) * self.packed.per_epoch
            return
        if differing:
            raise ValueError(
                "; ".join(f"{key} = {here}, but the checkpoint has {state[key]}" for key, here in differing.items())
            )
        self.next_row = state["row"]


_IDENTITY = ("seq_len", "seed", "data")
