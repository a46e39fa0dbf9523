"""Predictions of a training step by formula: traffic, memory and seconds; what a dry run counts; calibration of a
machine. Each file imports only earlier ones:

devices, fake_world, job, rounds, traffic, compute, memory, calibrate, meter, seconds.
"""
