"""Everything that knows transformers: models (presets and checkpoints), then integrate (their attention on a mesh)."""
