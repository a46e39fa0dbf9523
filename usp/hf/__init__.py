"""All that touches transformers. Each file imports only earlier ones:

integrate, tensor, models, tokenizers.
"""
