"""All that touches transformers. Each file imports only earlier ones:

pipeline, integrate, experts, balance, tensor, models, shape, disk, initialise, weights, export_plan, export, stage,
tokenizers.
"""
