"""All that touches transformers. Each file imports only earlier ones:

integrate, experts, balance, tensor, models, stage, disk, initialise, weights, export_plan, export,
tokenizers.
"""
