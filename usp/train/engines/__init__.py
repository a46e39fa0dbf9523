"""The engines that train a model's stages: forward, backward and the optimizer step.

Each file imports only earlier ones: base, forward_only, pipeline_runner, deepspeed, muon,
fsdp2.
"""
