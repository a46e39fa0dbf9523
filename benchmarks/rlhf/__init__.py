"""Benchmarks of RLHF: plans by search, measured here and as ReaL published them."""
