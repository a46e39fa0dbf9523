"""Everything that depends on transformers. Each file imports only earlier ones:

mixers, prune, shrink, disk, experts, positions, indexers, compressors, probe, images, integrate, models, processors,
tokenizers, expert_parallel, tensor_parallel, float8, weights, export, routers, stage, lora.
"""

from importlib.metadata import version

from usp.attention.versions import require

require("transformers", version("transformers"), "5.17")
