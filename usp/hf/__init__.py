"""Everything that knows transformers. Each file imports only earlier ones:

integrate (their attention on a mesh), models (presets and checkpoints), tokenizers.
"""
