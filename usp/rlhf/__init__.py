"""RLHF as a dataflow graph of model calls, each with its own ranks and layout. Each file imports only earlier ones:

data, graph, plan, generation, algorithms, api, roles, config, runtime, replan, checkpoints, validate, role_specs,
prepare, evaluation, sample_page, trainer.
"""
