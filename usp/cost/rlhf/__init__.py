"""Plans for RLHF by prediction. Each file imports only earlier ones:

estimates, quick_fill, predictions, options, simulator, shared_processors, step_bounds, plan_search, baselines,
plan_choice, question, described, plan_choice_report, run_plan.
"""
