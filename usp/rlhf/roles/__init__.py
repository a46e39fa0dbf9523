"""The models of roles: building, inference, training, memory. Each file imports only earlier ones:

weight_memory, rows, role_model, engine_model.
"""
