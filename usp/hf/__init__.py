"""All that touches transformers. Each file imports only earlier ones:

integrate, models, tokenizers.
"""
