"""Environments that answer the turns of a policy, in processes of their own. Each file imports only earlier ones:

outside, sandbox, ready_rewards, benchmarks, tool_calls, tools, agents, episodes.
"""
