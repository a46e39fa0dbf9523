"""Sampling responses with continuous batching. Each file imports only earlier ones:

decoding, turns, vllm, graphs, generate, partial.
"""
