"""Benchmarks of RLHF steps against TRL. Each file imports only earlier ones:

grpo_systems, grpo_step.
"""
