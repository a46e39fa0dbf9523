"""Predictions of a training step: traffic, memory and time by formula, a dry run, and the planner. Each file imports
only earlier ones:

job, methods, grid, traffic, time, memory, dry_run, planner, time_report, run_summary, compare.
"""
