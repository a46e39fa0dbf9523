"""Environments that answer the turns of a policy, in processes of their own. Each file imports only earlier ones:

outside, sandbox, ready_rewards, tools, agents, episodes.
"""
