"""Everything that depends on transformers. Each file imports only earlier ones:

chat, tokenizers, mixers, prune, structure, integrate, models, expert_parallel, tensor_parallel, shapes, balance, stage,
disk, initialise, export_plan, weights, export, lora.
"""
