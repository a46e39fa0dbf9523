"""Derive seeds from other seeds."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, key: object) -> int:
    """Return a seed for `key` (a step, a call, a sample), different from those of other keys."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=7).digest(), "big")
