"""RLHF algorithms: one file per family, listed in `registry`. Each file imports only earlier ones:

response_rows, statistics, rewards, loss_weights, objectives, algorithm, policy, sft, preferences, ppo, grpo, reinforce,
registry.

A new algorithm is one file (options, advantages, calls, its `Algorithm`) and one line of `registry.ALGORITHMS`, or an
entry of the mapping given to `prepare` and `train_rlhf`.
"""
