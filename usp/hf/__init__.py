"""Everything that depends on transformers. Each file imports only earlier ones:

mixers, prune, shrink, disk, experts, positions, indexers, probe, images, processors, tokenizers, integrate, models,
expert_parallel, tensor_parallel, float8, weights, export, dropout, router_bias, router_replay, stage, dora, lora.
"""
