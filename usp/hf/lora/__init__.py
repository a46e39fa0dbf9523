"""LoRA adapters (arXiv 2106.09685) through the package peft. Each file imports only earlier ones:

adapters, adapter_export.
"""
