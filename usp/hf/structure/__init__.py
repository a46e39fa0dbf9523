"""What a model does with a sequence, found by running a tiny copy of it. Each file imports only earlier ones:

shrink, experts, conversion, probe, verdict.
"""
