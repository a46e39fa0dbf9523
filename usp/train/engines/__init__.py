"""The engines that train a model's stages: forward, backward and the optimizer step.

base, deepspeed, fsdp2.
"""
