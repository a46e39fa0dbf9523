"""The models of roles: building, inference, training, memory. Each file imports only earlier ones:

role, forward, weight_memory, rows, role_spec, readers, role_model.
"""
