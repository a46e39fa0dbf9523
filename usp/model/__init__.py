"""Models in numbers, the rules on these numbers, and activation recomputation; without transformers. Each file imports
only earlier ones:

facts, rules, recompute.
"""
