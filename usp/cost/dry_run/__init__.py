"""One rank's real training step on fake tensors: bytes, FLOPs and peak memory without devices. Each file imports only
earlier ones:

fake_world, live_memory, known_values, step_meter, dry_run, dry_run_report, rlhf_calls, rlhf_calls_report.
"""
