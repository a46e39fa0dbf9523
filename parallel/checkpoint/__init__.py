"""Checkpoints that any layout can load. Each file imports only earlier ones:

safetensors_storage, checkpointer.
"""
