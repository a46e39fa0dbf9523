"""Resharding of parameters: which rank holds which part of each tensor, and moving weights between two such layouts.

Each file imports only earlier ones: boxes, param_layout, realloc_plan, reallocation, delta.
"""
