"""Everything that touches transformers. Each file imports only earlier ones:

expert_parallel, tokenizers, prune, tensor_parallel, balance, integrate, stage, models, shapes, disk, initialise,
export_plan, weights, export.
"""
