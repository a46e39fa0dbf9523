"""The time to send samples from the ranks that made them to those that read them, from the plan of the messages."""

from __future__ import annotations

from collections.abc import Mapping

from parallel import Hardware, message_seconds
from usp.rlhf.graph.keys import KeyKind
from usp.rlhf.runtime.transfer import Lengths, TransferPlan, message_bytes


def sample_seconds(plan: TransferPlan, kinds: Mapping[str, KeyKind], lengths: Lengths, hardware: Hardware) -> float:
    """Return the time of a transfer whose messages are all sent at once.

    Raises:
        ValueError: if the hardware connects too few devices.
    """
    links = {pair: message_bytes(message, kinds, lengths) for pair, message in plan.items.items()}
    return message_seconds(hardware, links).total
