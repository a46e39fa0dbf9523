"""RLHF as a dataflow graph of model calls, each with ranks and a layout of its own. Each file imports earlier ones:

samples, graph, plan, sampling, batching, generate.
"""
