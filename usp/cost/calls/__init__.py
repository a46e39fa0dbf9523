"""What a call of an RLHF step takes: seconds and memory, in any layout. Each file imports only earlier ones:

workload, batching_steps, call_cost, sample_seconds, plan_estimates.
"""
