"""The time of a step on given hardware, and the calibration of that hardware. Each file imports only earlier ones:

kernel_flops, compute, rounds, link_rates, calibrate, transfers, host, attention_time, pass_flops, pass_seconds,
model_flops, step_time, least_time.
"""
