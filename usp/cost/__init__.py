"""What a training step costs, before it runs. Each file imports only earlier ones:

job, sent, order, sharding, traffic, activations, stage_memory, split_backward, footprint, compute, time, calibrate,
paper, methods, comparison, plots, report, page, command, document, search, planner, advice, predictor, choice,
plan_report, known_values, live_memory, kernel_flops, fake_world, step_meter, dry_run, dry_run_report.
"""
