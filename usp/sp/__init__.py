"""Sequence-parallel attention layer, and sharding of sequences and batches. Each file imports only earlier ones:

axes, sequence, sp_attention, batch.
"""
