"""Chats by the chat templates of transformers tokenizers. Each file imports only earlier ones:

assistant_spans, template.
"""
