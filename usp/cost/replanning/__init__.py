"""Another RLHF plan for the steps that remain, by predictions that the run corrects. Each file imports only earlier
ones:

corrected, switching, plan_decision, run_planner.
"""
