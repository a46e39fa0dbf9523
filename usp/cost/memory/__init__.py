"""The peak memory of a step, by formula. Each file imports only earlier ones:

activations, stage_memory, split_backward, footprint, forward_memory, host_memory.
"""
