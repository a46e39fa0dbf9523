"""What a trained model does with a long context. Each file imports only earlier ones:

curves, needle, needle_probe.
"""
