"""The command lines: each file has the flags of one program, and runs what they ask for. Each file imports only
earlier ones:

train, rlhf_trace, cost, rlhf, plan, dry_run.
"""
