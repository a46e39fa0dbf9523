"""The models of roles: building, inference, training, memory. Each file imports only earlier ones:

role, weight_memory, rows, role_model.
"""
