"""Comparing token sequences; imports without `evaluate`."""


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Number of equal tokens before two sequences differ or one of them ends, `None` where they are the same."""
    if one == other:
        return None
    same = [a == b for a, b in zip(one, other)]
    return same.index(False) if False in same else len(same)
