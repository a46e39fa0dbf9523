from __future__ import annotations

import pytest

from attention import AttentionSpec


def test_all_violations_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"window=\(-2, 0\).*scale=0.*softcap=-1.*cu_seqlens=\(0, 5, 3\)"):
        AttentionSpec(window=(-2, 0), scale=0, softcap=-1, documents=((0, 5, 3),))


@pytest.mark.parametrize("boundaries", [(), (0,), (1, 4), (0, 4, 2)])
def test_invalid_document_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must start at 0, ascend"):
        AttentionSpec(documents=(boundaries,))


def test_documents_must_fit_the_batch() -> None:
    spec = AttentionSpec(documents=((0, 8), (0, 4), (0, 2)))
    assert spec.document_violation(3, 8) is None
    assert "3 rows for a batch of 2" in str(spec.document_violation(2, 8))
    assert "ends at 8, past the 6 tokens" in str(spec.document_violation(3, 6))


def test_causal_and_window_as_a_range_of_differences() -> None:
    assert AttentionSpec().difference_range() == (0, None)
    assert AttentionSpec(causal=False).difference_range() == (None, None)
    assert AttentionSpec(window=(3, 2)).difference_range() == (0, 3)  # causal overrides the right reach
    assert AttentionSpec(causal=False, window=(-1, 2)).difference_range() == (-2, None)
