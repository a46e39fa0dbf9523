"""RLHF algorithms: functions of samples, objectives of train steps, and a graph for each. Files import earlier ones:

kl, statistics, responses, weights, rewards, options, objectives, pairs, gae, batch, ppo, reinforce, graphs.
"""
