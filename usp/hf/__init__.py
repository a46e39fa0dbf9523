"""All that touches transformers. Each file imports only earlier ones:

pipeline, integrate, tensor, models, tokenizers.
"""
