"""Predictions of a training step: traffic, memory and time by formula, a dry run, and the planner; and of the steps of
RLHF plans. Each file imports only earlier ones:

job, methods, grid, traffic, memory, time, passes, calls, dry_run, planner, time_report, run_summary, compare, rlhf,
replanning, profile.
"""
