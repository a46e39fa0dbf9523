"""RLHF algorithms: one file per family, listed in `registry`. Each file imports only earlier ones:

response_rows, statistics, rewards, loss_weights, objectives, algorithm, policy, sft, preferences, ppo, grpo,
grpo_variants, reinforce, registry.

A new algorithm is one file (options, advantages, calls, its `Algorithm`), here with a line of `registry.ALGORITHMS`, or
outside, from the names of `usp.rlhf.api`: see docs/algorithms.md.
"""
