"""What a model is in numbers, and how its activations are recomputed; without transformers. Each file imports only
earlier ones:

facts, shapes, degrees, recompute.
"""
