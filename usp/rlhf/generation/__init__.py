"""Sampling responses with continuous batching. Each file imports only earlier ones:

responses, sampling, batching, generate.
"""
