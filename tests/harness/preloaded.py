"""Imported once for all ranks of tests: transformers compiles its patterns of every model's checkpoints at their first
use, which takes a rank longer than most steps."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
