"""Commands that search plans for RLHF. Each file imports only earlier ones:

rlhf_plan, rlhf_profile.
"""
