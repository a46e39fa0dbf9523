"""The search for the fastest layout that fits into memory. Each file imports only earlier ones:

layouts, search, advice, choice, plan_report.
"""
