from __future__ import annotations

import pytest

from usp.attention import AttentionSpec


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


def test_a_prefix_tree_must_fit_the_documents() -> None:
    with pytest.raises(ValueError, match=r"prefix_tree needs causal=True and cu_seqlens.*; prefix_tree must have for"):
        AttentionSpec(causal=False, parents=((0,),))
    spec = AttentionSpec(documents=((0, 3, 3, 8),), parents=((-1, 0, 0),))
    assert spec.document_violation(2, 8) is None and spec.row_depths(0, 8) == [0, 3, 3]
    fewer = AttentionSpec(documents=((0, 3, 8),), parents=((-1,),))
    assert fewer.document_violation(2, 8) == "prefix_tree has 1 entries for the 2 documents of row 0"


def test_prefixes_must_fit_the_documents() -> None:
    with pytest.raises(ValueError, match=r"prefix has no effect with causal=False.*; prefix must be numbers of tokens"):
        AttentionSpec(causal=False, prefixes=((-1,),))
    documents = ((0, 3, 8), (0, 8, 8))
    assert AttentionSpec(documents=documents, prefixes=((3, 5), (8, 0))).document_violation(2, 8) is None
    assert AttentionSpec(prefixes=((8,),)).document_violation(2, 8) is None
    violations = {
        ((3, 5), (8, 1)): "prefix of 1 tokens in document 1 of row 1, which has 0",
        ((3, 5, 0),): "prefix has 3 entries for the 2 documents of row 0",
        ((0, 0),) * 3: "prefix has 3 rows for a batch of 2",
    }
    for prefixes, violation in violations.items():
        assert violation in str(AttentionSpec(documents=documents, prefixes=prefixes).document_violation(2, 8))


def test_causal_and_window_as_a_range_of_differences() -> None:
    assert AttentionSpec().difference_range() == (0, None)
    assert AttentionSpec(causal=False).difference_range() == (None, None)
    assert AttentionSpec(window=(3, 2)).difference_range() == (0, 3)  # causal overrides the right reach
    assert AttentionSpec(causal=False, window=(-1, 2)).difference_range() == (-2, None)
    assert AttentionSpec(window=(3, 2)).difference_range(in_prefix=True) == (-2, 3)
