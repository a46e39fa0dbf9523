"""Block-attention back ends. Each file imports only earlier ones:

base, dense, reference, sdpa, varlen, flash, select.
"""
