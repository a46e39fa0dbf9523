"""The executor of a plan: transfers, reallocations, calls and their timeline. Each file imports only earlier ones:

timeline, activity, trace, measure, transfer, copies, step_plan, step_lengths, in_flight, summary, step_run, executor.
"""
