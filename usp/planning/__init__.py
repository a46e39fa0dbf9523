"""Choosing the parallelism of training runs and RLHF steps by prediction, and comparing strategies. Each file imports
only earlier ones:

question, methods, workload, search, corrections, call_cost, estimates, simulator, job_cost, step_report,
choice, tune, comparison, rlhf_search, rlhf_question, run_plan.
"""
