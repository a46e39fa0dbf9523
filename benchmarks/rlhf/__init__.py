"""Benchmarks of RLHF steps: against TRL, and with samples made ahead. Each file imports only earlier ones:

grpo_systems, grpo_step, staleness.
"""
