"""What the systems behind published rows fuse and hide, by their documentation and code; nothing follows from a row."""

from __future__ import annotations

from usp.predict.job import Stack

# github.com/pytorch/torchtitan: torch.compile of layers, which rotate in complex numbers (models/llama3), for which
# inductor calls torch's operators.
TORCHTITAN = Stack(fused=True)
# KempnerInstitute/KempnerForge: likewise (model/position.py); under tp each linear gathers its own input, five times a
# layer instead of twice, besides two scattered sums (distributed/tensor_parallel.py); the backward is its mirror.
KEMPNER = Stack(fused=True, exposed_tensor=7 / 4)
# torch.compile of layers that rotate in real numbers (github.com/PrimeIntellect-ai/prime-rl).
PRIME_RL = Stack(fused=True, fused_rotary=True)
# NVIDIA-NeMo/Automodel: torch.compile, experts as grouped products with fused permutations, and DeepEP, which sends a
# token once to a rank with any of its experts (for 8 of 128 experts on 8 ranks 4.6 rows of 7.0) and hides its dispatch.
AUTOMODEL = Stack(fused=True, fused_rotary=True, fused_experts=True, exposed_experts=4.6 / 7.0 / 2)
# Megatron with TransformerEngine: fused norms, rotations, SwiGLU, permutations and loss, gradients summed by products
# (gradient_accumulation_fusion), and of tp's messages all but the first of four chunks (tp_comm_overlap, whose
# pipelined default is num_splits=4) behind products.
MEGATRON = Stack(True, True, True, True, sums_gradients=True, exposed_tensor=1 / 4)
