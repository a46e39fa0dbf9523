"""The executor of a plan: transfers, reallocations, calls and their timeline. Each file imports only earlier ones:

timeline, transfer, rollouts, trace, measure, copies, state, executor.
"""
