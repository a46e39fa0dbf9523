"""The memory that a step needs, by formula. Each file imports only earlier ones:

activations, stage_memory, split_backward, footprint.
"""
