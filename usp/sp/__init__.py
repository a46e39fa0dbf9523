"""The sequence-parallel attention layer, convolutions and recurrences, and sharding of sequences and batches. Each file
imports only earlier ones:

axes, grid_channel, sequence, operator, kernel_choice, sp_attention, batch, spans, halo, scan, reshard, in_order,
recurrent_cache.
"""
