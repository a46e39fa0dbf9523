"""Back ends that compute attention between one block of queries and one block of keys, and the choice among them.

Each file imports only earlier ones: base, dense, reference, sdpa, varlen, flash, select.
"""
