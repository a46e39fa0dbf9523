"""Losses and log-probabilities over a sharded vocabulary, computed without materializing all logits. Each file imports
only earlier ones:

vocabulary, output_heads.
"""

from .output_heads import Head, LastHidden, NextTokenLoss
from .vocabulary import causal_lm_loss, global_token_count, vocab_logprobs, vocab_loss
