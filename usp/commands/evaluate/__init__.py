"""Commands that evaluate what was trained. Each file imports only earlier ones:

loss_by_position, needle.
"""
