"""RLHF as a dataflow graph of model calls, each with ranks and a layout of its own. Each file imports earlier ones:

samples, mini_batches, graph, dataflow, keys, partition, plan, plan_text, named_plans, fingerprint, role, schedule,
transfer, timeline, measure, step, summary, copies, run, executor, trace, algorithms, sampling, batching, generate,
spec, rows, heads, forward, storage, responses, models, examples, config, checkpoints, prepare, trainer, cli.
"""
