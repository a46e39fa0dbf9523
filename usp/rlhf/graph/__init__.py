"""The dataflow graph of a step: its calls, and the values that they exchange. Each file imports only earlier ones:

calls, dataflow, keys.
"""
