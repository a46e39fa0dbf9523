"""Models in numbers, the rules on these numbers, compilation and activation recomputation; without transformers. Each
file imports only earlier ones:

facts, recompute.
"""
