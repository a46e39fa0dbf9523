"""Execution plans: the layout of each call, and the schedule of operations. Each file imports only earlier ones:

plan, named_plans, operations.
"""
