"""The sequence-parallel attention layer, convolutions and recurrences, and sharding of sequences and batches. Each file
imports only earlier ones:

sequence, kernel_choice, spans, mask, sp_attention, scan, in_order.
"""
