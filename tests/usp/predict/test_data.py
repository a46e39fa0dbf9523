"""Packed documents and uneven routers as arguments of predictions: FLOPs, messages, kernels, experts, flags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.usp.predict.jobs import job, llama
from usp.__main__ import main
from usp.attention import band_pairs
from usp.parallel import load_hardware
from usp.predict.compute import model_flops
from usp.predict.job import Data, Job
from usp.predict.memory import footprint
from usp.predict.seconds import step_seconds
from usp.predict.traffic import step_traffic

H100 = load_hardware("h100")


def sent(made: Job, axis: str) -> int:
    """Return the bytes of messages and exchanges along an axis."""
    kinds = ("send", "alltoall_base_")
    return sum(part.nbytes for part in step_traffic(made, 0) if part.axis == axis and part.collective in kinds)


def test_documents_fill_a_sequence() -> None:
    assert Data().boundaries(10) == (0, 10)
    assert Data((4,)).boundaries(10) == (0, 4, 8, 10)
    assert Data((1, 5)).boundaries(12) == (0, 1, 6, 7, 12)
    assert Data((20,)).boundaries(10) == (0, 10)


def test_documents_leave_their_own_pairs_and_messages() -> None:
    whole, packed = (llama(8, Data(lengths), sp_ring=8) for lengths in ((), (4096,)))
    facts = whole.model.facts
    per_pair = 6 * facts.num_heads * 2 * facts.head_dim * 32  # layers
    fewer = band_pairs(65536, 65536, 0, 0, None) - 16 * band_pairs(4096, 4096, 0, 0, None)
    assert model_flops(whole) - model_flops(packed) == per_pair * fewer
    slow, fast = (step_seconds(made, H100) for made in (whole, packed))
    assert fast.compute.attention < 0.2 * slow.compute.attention
    assert fast.compute.matmul == slow.compute.matmul
    assert sent(packed, "ring") == 0 < sent(whole, "ring")  # zigzag's pieces of 4,096 tokens are the documents
    longer = llama(8, Data((16384,)), sp_ring=8)
    assert 0 < sent(longer, "ring") < sent(whole, "ring")
    assert (slow.kernels, fast.kernels) == (("cudnn",), ("flash-attn-2",))  # which takes packed rows


def test_the_busiest_rank_has_more_rows_of_experts() -> None:
    flags: dict[str, Any] = {"model": "mixtral-8x7b", "seq_len": 8192, "ep": 8, "ac": "full", "router_balance": "step"}
    even, uneven = (job(8, Data(router_imbalance=factor), **flags) for factor in (1.0, 1.5))
    assert uneven.expert_rows(8192) == 1.5 * even.expert_rows(8192) == 1.5 * 2 * 8192
    assert sent(uneven, "ep") == pytest.approx(1.5 * sent(even, "ep"), rel=1e-3)  # but for the counts of rows
    before, after = (step_seconds(made, H100) for made in (even, uneven))
    assert after.compute.matmul > 1.2 * before.compute.matmul and after.compute.attention == before.compute.attention
    assert footprint(uneven, 0).peak.total > footprint(even, 0).peak.total
    alone = [job(8, Data(router_imbalance=factor), **{**flags, "ep": 1}) for factor in (1.0, 1.5)]
    assert step_seconds(alone[0], H100).total == step_seconds(alone[1], H100).total  # each rank has all experts


@pytest.mark.slow
def test_flags_say_what_the_data_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["time", "--model", "mixtral-8x7b", "--seq-len", "32K", "--world-size", "8", "--ep", "8", "--json"]

    def seconds(*flags: str) -> float:
        assert main([*asked, *flags]) == 0
        return float(json.loads(capsys.readouterr().out)["seconds"])

    assert seconds("--document-tokens", "1K,4K") < seconds() < seconds("--router-imbalance", "1.5")
    plan = ["plan", "--model", "tiny", "--seq-len", "8K", "--world-size", "2", "--document-tokens", "512"]
    assert main(plan) == 0 and main(["cost", *plan[1:5], "--world-size", "2", "--document-tokens", "512"]) == 0
    capsys.readouterr()
    for wrong, said in (
        (["--document-tokens", "many"], "many must be a number of tokens"),
        (["--document-tokens", "0"], "documents=0 must be at least 1"),
        (["--router-imbalance", "0.5"], "router_imbalance=0.5 must be at least 1"),
        (["--model", "tiny", "--ep", "1", "--router-imbalance", "2"], "has no effect on tiny, which has no experts"),
    ):
        assert main([*asked, *wrong]) == 1 and said in capsys.readouterr().err
