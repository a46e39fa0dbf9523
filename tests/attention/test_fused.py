"""The Triton merge against torch's in Triton's interpreter, and Triton's kernels compiled for GPUs that are not there:
`pip install triton`, no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from usp.attention.accumulate import merge

RUNS, TOKENS, HEADS = 2, 37, 3  # rows that do not fill the last program


def parts(width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return views of larger buffers: out, lse, a part and its lse, heads before tokens; some rows are empty."""
    torch.manual_seed(width)
    out = torch.randn(RUNS, TOKENS + 2, HEADS, width)[:, 1:-1]
    part = torch.randn(RUNS, TOKENS, HEADS, width + 8, dtype=torch.float32).to(dtype)[..., :width]
    lse, part_lse = torch.randn(RUNS, TOKENS, HEADS) * 9, (torch.randn(RUNS, HEADS, TOKENS) * 9).transpose(1, 2)
    lse[:, ::3], part_lse[:, ::2] = float("-inf"), float("-inf")  # rows 0, 6, 12, ... have neither
    out[:, ::3] = 0
    part[:, ::2] = 0
    return out, lse, part, part_lse


def compare() -> None:
    from usp.attention import fused

    for width in (64, 80, 128):
        for dtype in (torch.bfloat16, torch.float32):
            out, lse, part, part_lse = parts(width, dtype)
            wanted = out.clone(), lse.clone()
            merge(*wanted, part, part_lse)
            around = torch.cat((out._base[:, :1], out._base[:, -1:])).clone()
            fused.merge(out, lse, part, part_lse)
            torch.testing.assert_close(out, wanted[0], rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(lse, wanted[1], rtol=1e-6, atol=1e-6)
            assert torch.equal(torch.cat((out._base[:, :1], out._base[:, -1:])), around)
            assert not out[:, ::6].any() and bool(lse[:, ::6].isneginf().all())
    print("as torch's")


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_the_fused_merge_is_torchs() -> None:
    command = [sys.executable, "-c", "from tests.attention.test_fused import compare; compare()"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert run.stdout.strip() == "as torch's", run.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
def test_every_kernel_compiles(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the product launches it; ptxas comes with Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from usp.attention import fused

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for width, dtype in ((128, torch.bfloat16), (80, torch.float32)):
        with monkeypatch.context() as patch:
            patch.setattr(
                JITFunction, "run", lambda self, *args, grid, warmup, **named: launches.append((self, args, named))
            )
            fused.merge(*parts(width, dtype))
    assert {kernel for kernel, *_ in launches} == {x for x in vars(fused).values() if isinstance(x, JITFunction)}
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, args, constants in launches:
        given = dict(zip(kernel.arg_names, args, strict=False))
        signature = {name: types[x.dtype] if isinstance(x, Tensor) else "i32" for name, x in given.items()}
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        assembly = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
        assert f".target sm_{capability}" in assembly["ptx"] and assembly["cubin"]
