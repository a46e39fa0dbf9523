"""RLHF algorithms: one file per family, listed in `registry`. Each file imports only earlier ones:

response_rows, rewards, objectives, algorithm, policy, preferences, ppo, critic_free, registry.
"""
