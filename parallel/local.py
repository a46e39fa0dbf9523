"""Access to the local part of a tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; return other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
