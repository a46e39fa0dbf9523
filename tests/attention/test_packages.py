"""The real packages behind the stand-ins of cuda_calls.py, where they are installed: flash-attn-4 compiles for GPUs
that are not there, and the signatures of all are compared with their sources.

    pip install --pre flash-attn-4                                  # then: pytest tests/attention/test_packages.py
    python -m tests.attention.signatures FOLDER                     # of unpacked sources of flash-attn 2, 3 or 4
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from usp.attention.kernels import flash
from usp.attention.kernels.flash import FlashAttn4Kernel, is_replaced, release

from .flash4 import CASES
from .signatures import SOURCES, differences

ARCHITECTURES = {9: ("sm_90", "sm_90a", "132"), 10: ("sm_100", "sm_100a", "148")}


@pytest.mark.skipif(release("flash-attn-4") is None, reason="the package flash-attn-4 is not installed")
@pytest.mark.parametrize("major", ARCHITECTURES)
def test_flash_attn_4_compiles_what_its_back_end_takes(major: int) -> None:
    names = ("FLASH_ATTENTION_ARCH", "CUTE_DSL_ARCH", "FLASH_ATTENTION_NUM_SMS")
    environment = {**os.environ, **dict(zip(names, ARCHITECTURES[major], strict=True))}
    command = [sys.executable, "-m", "tests.attention.flash4", str(major)]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=1800)
    lines = [line.split(" | ") for line in run.stdout.splitlines() if " | " in line]
    assert [name for name, *_ in lines] == list(CASES), run.stderr[-2000:]
    for name, choice, raised in lines:
        assert choice == ("refused" if major in CASES[name].refused_on else "taken")
        # With several sequences some kernels are also launched, which takes a driver; by then they have compiled.
        assert choice == "refused" or raised == "compiles" or "NVIDIA driver library" in raised, f"{name}: {raised}"


@pytest.mark.parametrize("path", SOURCES)
def test_signatures_are_those_of_an_installed_package(path: str) -> None:
    if "cute" in path and release("flash-attn-4") is None:
        pytest.skip("flash-attn 2 has an older file of this name, which flash-attn-4 replaces")
    top = find_spec(path.split("/")[0])
    roots = [] if top is None else [Path(each).parent for each in top.submodule_search_locations or ()]
    files = [file for root in roots if (file := root / path).exists()]
    if not files:
        pytest.skip(f"no installed package has {path}")
    assert not differences(path, files[0].read_text())


def test_a_changed_signature_is_found() -> None:
    path = "flash_attn/cute/interface.py"
    same = "def _flash_attn_fwd(q, k, v, cu_seqlens_q=None, return_lse=False): ...\ndef _flash_attn_bwd(q, k): ...\n"
    found = differences(path, same)
    assert any("_flash_attn_fwd has no causal" in each for each in found)
    assert any("_flash_attn_bwd" in each for each in found)
    schema = 'm.def("bwd("\n  "Tensor dout,"\n  "Tensor q) -> (Tensor)");'
    assert any(each.startswith("bwd(") for each in differences("hopper/flash_api_stable.cpp", schema))


@pytest.mark.parametrize(("size", "said"), [(11, None), (10, "has replaced a file of flash-attn-4")])
def test_a_file_that_another_package_replaced_is_found(
    size: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, about = Path("flash_attn/cute/interface.py"), tmp_path / "flash_attn_4-4.0.0.dist-info"
    (tmp_path / path).parent.mkdir(parents=True)
    about.mkdir()
    (tmp_path / path).write_text("# interface")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    (about / "RECORD").write_text(f"{path},sha256=x,{size}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (release, is_replaced):
        monkeypatch.setattr(flash, cached.__name__, cached.__wrapped__)
    found = FlashAttn4Kernel().missing()
    assert found is None if said is None else said in str(found)
