"""The time that a device spends on its host: copies, what hides them, the update, and launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.usp.predict.jobs import job
from usp.parallel import load_hardware
from usp.predict.compute import head_seconds
from usp.predict.job import Job
from usp.predict.memory import footprint, host_bytes
from usp.predict.seconds import TransferSeconds, host_copies, step_seconds
from usp.predict.traffic import elements, pass_parts

H100 = load_hardware("h100")
LAYERS, SAVED = 32, "attention-saved"


def llama(world_size: int = 8, **flags: object) -> Job:
    return job(world_size, **{"model": "llama3-8b", "seq_len": 65536, "dtype": "bfloat16", "ac": SAVED, **flags})


def test_a_layers_compute_hides_the_copy_of_what_its_neighbour_offloads() -> None:
    made = llama(sp_ulysses=8, ac_offload=True)
    nbytes = footprint(made, 0).host
    seconds = nbytes / 55e9  # in each direction
    found = host_copies(made, H100, 0, forward=1e3, backward=1e3)["host"]
    assert found.exposed + found.overlapped == pytest.approx(2 * seconds)
    assert found.exposed == pytest.approx(2 * seconds / LAYERS)  # the last copy out and the first back
    waits = host_copies(made, replace(H100, streams=False), 0, forward=1e3, backward=1e3)["host"]
    assert waits == TransferSeconds(pytest.approx(2 * seconds), 0.0)
    shared = host_copies(made, replace(H100, host_memory_bytes_per_second=100e9), 0, forward=1e3, backward=1e3)["host"]
    assert shared.exposed == pytest.approx(8 * nbytes / 80e9 * 2 / LAYERS)  # eight devices, 0.8 of the rate
    assert not host_copies(llama(sp_ulysses=8), H100, 0, 1.0, 1.0)


def test_offloading_takes_the_time_that_compute_does_not_hide() -> None:
    plain, offloaded = (step_seconds(llama(sp_ulysses=8, ac_offload=on), H100) for on in (False, True))
    assert offloaded.total == pytest.approx(plain.total + offloaded.communication["host"].exposed)
    slow = step_seconds(llama(sp_ulysses=8, ac_offload=True), replace(H100, host_link_bytes_per_second=1e9))
    assert slow.communication["host"].exposed > 10 * offloaded.communication["host"].exposed
    assert slow.communication["host"].overlapped > 0


def test_copies_and_messages_to_other_hosts_share_a_devices_link() -> None:
    made = llama(16, dp_shard=16, zero=3, ac_offload=True)
    sent = tuple(pass_parts(made, 0)["forward"]), ()
    gathers = [part for part in sent[0] if part.axis == "fsdp"]
    on_link = sum(part.nbytes for part in gathers) / 8 / 55e9  # what leaves a host passes its eight links
    copied = footprint(made, 0).host / 55e9
    enough, head = copied + on_link, head_seconds(made, H100)[0].total  # which hides no copies
    for forward, exposed in ((enough, 0.0), (copied, on_link), (0.0, copied)):
        one, other = (host_copies(made, H100, 0, head + forward, 1e3, sent=parts)["host"] for parts in (sent, ((), ())))
        assert one.exposed == pytest.approx(copied * 2 / LAYERS + exposed * (LAYERS - 1) / LAYERS, rel=1e-6)
        assert one.exposed + one.overlapped == pytest.approx(2 * copied)
        assert other.exposed <= one.exposed
    pcie4 = replace(H100, host_link_bytes_per_second=25e9)
    own_link = replace(pcie4, tiers=tuple(replace(tier, on_host_link=False) for tier in H100.tiers))
    short = llama(16, seq_len=2048, dp_shard=16, zero=3, ac_offload=True)
    apart, shared = (step_seconds(short, hardware).communication["host"] for hardware in (own_link, pcie4))
    assert apart.exposed < shared.exposed
    inside = llama(8, dp_shard=8, zero=3, ac_offload=True)  # NVLink is no part of the link to the host
    assert step_seconds(inside, own_link) == step_seconds(inside, pcie4)


def test_weights_and_gradients_of_an_offloaded_optimizer_are_copied_as_often_as_they_are_gathered() -> None:
    def copied(micro_batches: int, zero: int) -> float:
        batch = {"batch_size": micro_batches, "micro_batches": micro_batches}
        made = llama(dp_shard=8, zero=zero, optim_offload=True, **batch)
        found = host_copies(made, H100, 0, 0.0, 0.0)["host"]
        return found.exposed / (4 * elements(made, 0, "shard") / 55e9)

    on_host = 55e9 * 8 / (614.4e9 * 0.8)  # reads or writes by all eight devices, as a part of a copy's time
    both = 2 * on_host  # gradients out, while the weights of the next layer come back
    assert copied(1, zero=1) == copied(4, zero=1) == pytest.approx(2)
    assert copied(1, zero=3) == pytest.approx(1 + both)
    assert copied(4, zero=3) == pytest.approx(4 + both + 3 * (1 + 1 + 3 * on_host))  # the host adds three of four
    made = llama(dp_shard=8, optim_offload=True)
    assert step_seconds(made, H100).optimizer == pytest.approx(36 * elements(made, 0, "shard") * 8 / (614.4e9 * 0.8))


def test_small_layers_wait_for_their_launches() -> None:
    tiny, long = (step_seconds(llama(seq_len=length, ac="none", zero=0), H100) for length in (64, 65536))
    assert long.compute.launch == 0.0 == tiny.compute.launch  # the reduction of gradients takes longer
    alone, slow = llama(1, seq_len=64, ac="none", zero=0), 3 * H100.launch_seconds
    waits, free = (step_seconds(alone, replace(H100, launch_seconds=seconds)) for seconds in (slow, 0.0))
    operators = 3 * LAYERS * (7 + 31) + 200  # of the embedding, the head and the optimizer
    assert waits.total == pytest.approx(operators * slow + waits.optimizer)
    assert waits.total > free.total and waits.compute.launch == pytest.approx(waits.total - free.total)
    compiled = step_seconds(llama(1, seq_len=64, ac="none", zero=0, compile=True), replace(H100, launch_seconds=slow))
    assert compiled.compute.launch == 0.0


@pytest.mark.parametrize(
    ("flags", "operators"),
    [
        ({"tp": 2, "zero": 0}, 30 * (4 * LAYERS + 1)),  # and of the embedding; the loss calls its own
        ({"zero": 3}, 45 * (3 * (LAYERS + 1) - 1)),  # the root is gathered once
        ({"sp_ulysses": 2, "zero": 0}, 0),
    ],
)
def test_collectives_that_libraries_issue_take_the_host_longer(flags: dict[str, int], operators: int) -> None:
    made, host = llama(2, seq_len=64, ac="none", **flags), replace(H100, streams=False)  # computes after issuing
    without, found = (step_seconds(made, host, collective=each).compute.launch for each in (0.0, None))
    assert found - without == pytest.approx(operators * H100.launch_seconds)


def test_a_host_keeps_what_all_of_its_ranks_offload() -> None:
    pipeline = llama(16, pp=4, batch_size=4, micro_batches=4, ac_offload=True)
    kept = [footprint(pipeline, rank).host for rank in pipeline.ranks("pp", 0)]
    assert kept[0] > kept[1] > kept[2] > kept[3]  # micro-batches in flight
    assert host_bytes(pipeline, 4) == 4 * kept[0]
    assert host_bytes(pipeline, 8) == 4 * (kept[0] + kept[1])
    assert host_bytes(pipeline, 16) == 4 * sum(kept)
