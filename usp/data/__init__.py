"""Documents, tokenizers, token stores, packed rows and what a rank reads of them. Each file imports only earlier ones:

reading, files, chat, documents, tokenizer, progress, store, tokenizing, cache, permutation, packing, whole, mixture,
stream, reader.
"""
