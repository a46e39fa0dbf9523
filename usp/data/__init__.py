"""Documents, tokenizers, token stores, packed rows and what a rank reads of them. Each file imports only earlier ones:

sources, chats, documents, tokenizer, store, tokenizing, cache, rows, batches.
"""
