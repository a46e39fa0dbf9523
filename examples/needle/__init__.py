"""A needle in a haystack: which of a long text's sentences a trained model finds again, by length and depth.

    python -m examples.needle RUN/model
    torchrun --nproc-per-node 8 -m examples.needle RUN/model --lengths 16K,64K --sp-ulysses 8

Prompts, and the flags, are in prompts.py; generation on every layout, tables and plots are in probe.py.
"""
