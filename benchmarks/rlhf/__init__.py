"""Benchmarks of RLHF steps: against TRL, with samples made ahead, against predictions, and of the search for plans.

Each file imports only earlier ones:

grpo_systems, grpo_step, staleness, estimates, search_quality, real_rows, real_system, real_search,
real_figure, long_rollouts, searched_plans, replan, long_tails, delta_updates, shared_prefixes, tool_use.
"""
