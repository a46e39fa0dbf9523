"""The calls of an RLHF step, measured on this machine in every layout of its ranks: a file for rlhf-plan --profile.

torchrun --nproc-per-node 8 -m examples.rlhf_profile --actor qwen3-8b --out profile.json
"""
