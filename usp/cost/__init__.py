"""What a training step costs, before it runs. Each file imports only earlier ones:

job, known_values, live_memory, kernel_flops, fake_world, step_meter, dry_run, dry_run_report.
"""
