"""What a training step costs, before it runs. Each file imports only earlier ones:

job, order, sent, sharding, traffic, compute, time, calibrate, footprint, paper, known_values, live_memory,
kernel_flops, fake_world, dry_run.
"""
