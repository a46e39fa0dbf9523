"""What a step calls, and how outputs of one call are inputs of another. Each file imports only earlier ones:

calls, dataflow, keys.
"""
