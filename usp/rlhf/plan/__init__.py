"""Where each call runs: layouts, plans by name, and the order of operations that follows. Each file imports only
earlier ones:

plan, named_plans, operations, plan_text.
"""
