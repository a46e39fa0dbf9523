"""Which rank holds which part of a tensor, and how parameters move between two such layouts. Each file imports only
earlier ones:

boxes, param_layout, realloc_plan, reallocation.
"""
