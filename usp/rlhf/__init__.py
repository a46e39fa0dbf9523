"""RLHF as a dataflow graph of model calls, each with its own ranks and layout. Each file imports only earlier ones:

samples, rollout_queue, environments, graph, served, datasets, plan, generation, sampling, algorithms, api, roles,
config, runtime, checkpoints, role_specs, evaluation, replanning, records, prepare, trainer, dry_run.
"""
