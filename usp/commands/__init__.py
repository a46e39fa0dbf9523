"""The command lines, one file per program. Each file imports only earlier ones:

flags, command, train, rlhf, plan, time, dry_run, rlhf_dry_run, cost, calibrate, models, tokenize, rlhf_trace,
rlhf_samples, evaluate, rlhf_plans.
"""
