from __future__ import annotations

import pickle

from usp.parallel import all_of, option, violation_of

TP = option("tp", 3) + " must divide 8 heads of runs/tp=2: use " + option("tp", "2, 4")


def test_who_shows_a_violation_names_its_arguments() -> None:
    assert str(TP) == "tp=3 must divide 8 heads of runs/tp=2: use tp=2, 4"
    flags = TP.renamed(tp="tensor").shown(lambda name, value: f"--{name} {value}")
    assert flags == "--tensor 3 must divide 8 heads of runs/tp=2: use --tensor 2, 4"


def test_an_error_keeps_its_violation() -> None:
    error = pickle.loads(pickle.dumps(ValueError(TP)))
    assert str(error) == str(TP) and violation_of(error) == TP
    assert str("line 3: " + violation_of(ValueError("no text"))) == "line 3: no text"
    assert violation_of(ValueError()).parts == ("",)


def test_several_are_one() -> None:
    both = all_of([TP, "no text"])
    assert both.parts == (*TP.parts, "; ", "no text") and str(all_of([])) == ""
