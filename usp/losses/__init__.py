"""Losses and log-probabilities over a sharded vocabulary, computed without materializing all logits. Each file imports
only earlier ones:

vocabulary, logprobs, cross_entropy, output_heads.
"""

from .cross_entropy import causal_lm_loss, global_token_count, vocab_loss
from .logprobs import vocab_logprobs
from .output_heads import Head, LastHidden, NextTokenLoss
