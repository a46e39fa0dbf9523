"""Losses and log-probabilities over a sharded vocabulary, without ever holding all logits. Each file imports only
earlier ones:

vocabulary, logprobs, cross_entropy, output_heads.
"""
