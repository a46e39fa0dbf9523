"""Everything that touches transformers. Each file imports only earlier ones:

prune, integrate, models, expert_parallel, balance, disk, initialise, weights, export_plan, export, stage,
tensor_parallel, shapes, tokenizers.
"""
