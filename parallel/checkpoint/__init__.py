"""Asynchronous checkpoints of distributed tensors, in safetensors files, which load into any parallel layout.

Each file imports only earlier ones: safetensors_storage, checkpointer.
"""
