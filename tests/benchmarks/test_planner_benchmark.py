"""The planner's benchmark compares equal batches, and names the predicted fastest configuration."""

from __future__ import annotations

from benchmarks.planner import SEQUENCES, answer, mixtures, name, notes
from usp.hf.models import load_model_config
from usp.train.resolve import job_of


def test_every_mixture_trains_the_same_batch() -> None:
    configs = mixtures(8, quick=False)
    assert len({name(config) for config in configs}) == len(configs) >= 20
    jobs = [job_of(config, load_model_config(config.model), 8) for config in configs]
    assert {job.config.batch_size * job.dims.batch for job in jobs} == {SEQUENCES}


def test_the_predicted_fastest_is_compared_with_the_measured_fastest() -> None:
    rows = [
        {"mixture": "a", "measured": 1.0, "predicted": 1.2, "spread": 0.02},
        {"mixture": "b", "measured": 1.1, "predicted": 1.1, "spread": 0.01},
    ]
    found, load = answer(rows), notes(rows, 0.25)[0]
    assert "of 2 combinations of degrees are predicted within 10.0% on average and 20.0% at worst" in found
    assert "The predicted fastest, b, takes 1.10 times the time of the measured fastest, a." in found
    assert load.startswith("Other programs used 25% of the processors.") and load.endswith("up to 2%.")
