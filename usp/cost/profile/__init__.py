"""What the calls of an RLHF step take on this machine, measured in parts. Each file imports only earlier ones:

parts, profile, moves, profiled_estimates, profiled_question, measure_profile, measure_moves, measure_step.
"""
