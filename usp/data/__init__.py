"""Documents, tokenizers and packed batches. Each file imports only earlier ones:

documents, tokenizer, packing, stream.
"""
