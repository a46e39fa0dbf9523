"""PPO and its kin: options, advantages, objectives, and the graph of each. Each file imports only earlier ones:

gae, kl, response_rows, statistics, objectives, rewards, weights, pairs, options, scored_batch, ppo, reinforce,
graphs.
"""
