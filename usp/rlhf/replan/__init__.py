"""Another plan for the steps that remain, chosen while a run goes on. Each file imports only earlier ones:

replan_options, measured_steps, replan_decision, replanning.
"""
