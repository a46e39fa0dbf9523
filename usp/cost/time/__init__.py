"""The seconds that a step takes on given hardware, and how that hardware is measured. Each file imports only earlier
ones:

calibrate, compute, kernel_flops, step_time.
"""
