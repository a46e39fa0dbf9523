"""What an expert would answer to questions of a planner, written down with the reason before it was asked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from usp.config import TrainConfig
from usp.parallel import load_hardware
from usp.planning.choice import choose, degrees

K, M = 1024, 1024**2
H100 = load_hardware("h100")


@dataclass(frozen=True)
class Question:
    model: str
    seq_len: int
    sequences: int  # of a step
    gpus: int
    lora_rank: int = 0

    def __str__(self) -> str:
        return f"{self.model}, {self.sequences} x {self.seq_len // K}K, {self.gpus} GPUs"


ANSWERS = {  # the degrees, and why
    Question("qwen3-8b", 128 * K, 1, 8): ("ring 8|ulysses 8", "with one sequence there is nothing else to shard"),
    Question("llama3-8b", 8 * K, 8, 8): ("dp_shard 8", "a rank can hold a sequence of 8K"),
    Question("llama3-8b", 8 * K, 64, 8): ("dp_shard 8", "more sequences change nothing"),
    Question("qwen3-8b", 4 * K, 64, 8): ("dp_shard 8", "likewise"),
    Question("llama3-8b", 32 * K, 8, 8): ("dp_shard 8", "a rank can hold 32K if layers are recomputed"),
    Question("qwen3-32b", 32 * K, 16, 16): ("dp_shard 16", "likewise"),
    Question("llama3-8b", M, 1, 32): ("ring 4 ulysses 8", "Ulysses inside hosts, and the ring between them"),
    Question("llama3-70b", 8 * K, 128, 64): ("dp_shard 64", "ZeRO-3 alone shards the states enough"),
    Question("qwen3-30b-a3b", 4 * K, 64, 8): ("dp_shard 8 ep 8", "experts are most of the states"),
    Question("mixtral-8x7b", 4 * K, 64, 16): ("dp_shard 16|dp_shard 16 ep 8", "either shards the experts enough"),
    Question("llama3-8b", 8 * K, 8, 1): ("one rank", "states of 120 GB must be in host memory"),
    Question("llama3-8b", 32 * K, 4, 1, lora_rank=16): ("one rank", "frozen weights have no states"),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "question",
    [pytest.param(each, marks=pytest.mark.exhaustive if each.lora_rank else ()) for each in ANSWERS],
    ids=str,
)
@pytest.mark.slow(but=1, full=8)
def test_the_first_answer_is_an_experts(question: Question, compiles: bool) -> None:
    asked = TrainConfig(
        model=question.model,
        seq_len=question.seq_len,
        global_batch_size=question.sequences,
        lora_rank=question.lora_rank,
        dtype="bfloat16",
        compile=compiles,
    )
    best = choose(asked, question.gpus, H100).best.config
    expected, why = ANSWERS[question]
    assert degrees(best) in expected.split("|"), why
    assert (best.ac_offload, best.optim_offload) == (False, expected == "one rank" and not question.lora_rank)
    tokens = best.seq_len * best.batch_size // best.micro_batches // (best.sp_ring * best.sp_ulysses)
    assert tokens <= 64 * K  # of a rank and a micro-batch: more gain nothing
