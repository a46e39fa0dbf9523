"""The bytes that plans of layers in sequence order say a rank sends in a forward, and in its backward."""

from __future__ import annotations

from usp.sp.spans import HaloPlan, SpanPlan, TokenMoves


def state_bytes(plan: SpanPlan, row_bytes: int) -> tuple[int, int]:
    """Return those of states with so many bytes per row."""
    sent = received = 0
    for message in plan.messages:
        source, destination = plan.holder(next(iter(message))), plan.holder(next(iter(message.values()))[0])
        if source != destination:
            sent += len(message) * (source == plan.rank)
            received += len(message) * (destination == plan.rank)
    return sent * row_bytes, received * row_bytes


def halo_bytes(plan: HaloPlan, token_bytes: int) -> tuple[int, int]:
    """Return those of one convolution over tokens of so many bytes."""
    return moved_bytes(plan.moves, plan.spans.rank, token_bytes)


def moved_bytes(moves: TokenMoves, rank: int, token_bytes: int) -> tuple[int, int]:
    """Return those of tokens of so many bytes that move."""
    sides = moves.sends, moves.receives
    sent, received = (sum(len(index) for peer, index in enumerate(side) if peer != rank) for side in sides)
    return sent * token_bytes, received * token_bytes
