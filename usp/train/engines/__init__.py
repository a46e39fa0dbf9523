"""The engines that train a model's stages: forward, backward and the optimizer step.

Each file imports only earlier ones: base, router_counts, pipeline_runner, deepspeed, fsdp2.
"""
