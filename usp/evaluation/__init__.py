"""What a trained model does with a long context. Each file imports only earlier ones:

curves, needle_flags, haystack, heat_map, needle_probe.
"""
