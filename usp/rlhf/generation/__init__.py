"""Sampling responses with continuous batching. Each file imports only earlier ones:

support, responses, sampling, stopping, batching, generate.
"""
