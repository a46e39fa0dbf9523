"""A role's model on its ranks: how it is built, what it reads, how it trains. Each file imports only earlier ones:

role, forward, weight_memory, rows, spec, readers, role_model.
"""
