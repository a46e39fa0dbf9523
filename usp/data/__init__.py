"""Documents, tokenizers, token stores and packed batches. Each file imports only earlier ones:

reading, files, documents, tokenizer, store, packing, stream.
"""
