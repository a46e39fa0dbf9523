"""The command lines, one file per program. Each file imports only earlier ones:

flags, tokenize, train, rlhf, plan, time, dry_run, rlhf_dry_run, cost, calibrate, rlhf_trace, rlhf_samples, rlhf_plan.
"""
