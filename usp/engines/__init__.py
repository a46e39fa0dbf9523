"""What trains a model's stages: forward, backward and the optimiser's step. Each file imports only earlier ones:

base, pipeline, fsdp2, deepspeed.
"""
