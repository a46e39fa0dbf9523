"""Data sets, and the samples that calls exchange. Each file imports only earlier ones:

datasets, held_out, mini_batches, samples, fingerprint, seeds, partition.
"""
