"""Chats and prompts with completions, of which only some tokens are targets. Each file imports only earlier ones:

conversation, row_kind, excerpt.
"""
