"""All that touches transformers. Each file imports only earlier ones:

pipeline, integrate, experts, balance, tensor, models, weights, stage, tokenizers.
"""
