"""RLHF as a dataflow graph of model calls, each with ranks and a layout of its own. Each file imports only earlier ones:

samples, graph, plan.
"""
