"""Sizes of groups for the tests: drawn, and as slow Python that follows docs/numerics.md, section 2."""

import hypothesis.strategies as st
import numpy as np

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)

# (sizes, m): empty groups (C1-C3), one group that is not all (C5), a tail (C6), blocks and tiles that straddle groups
# (C7, C8, A7), nothing at all (C4), and values that are no sizes.
CASES = {
    "empty between": ([8, 0, 8, 0], 16),
    "empty first": ([0, 0, 5, 11], 16),
    "all empty": ([0, 0, 0], 24),
    "one group with a tail": ([40], 96),
    "straddling blocks": ([1, 17, 31, 33, 127, 129], 338),
    "two": ([44, 20], 64),
    "scale padding": ([1, 0, 31, 3], 40),
    "everything in one": ([0, 70, 0], 70),
    "negative and too large": ([-5, 20, INT32_MAX, 7, INT32_MAX], 50),
    "no rows": ([0, 3], 0),
    "no groups": ([], 5),
    "one row": ([0, 1], 1),
}


def slices(sizes, m: int) -> list[slice]:
    """The rows of each group."""
    found, start = [], 0
    for size in np.asarray(sizes):  # also of a jax array under a trace
        end = min(start + max(int(size), 0), m)
        found.append(slice(start, end))
        start = end
    return found


def total(sizes, m: int) -> int:
    """The rows that have a group."""
    return min(sum(max(int(size), 0) for size in sizes), m)


def group_sizes(groups: int, m: int):
    """A strategy: int32 [groups], whose sum is below, at or above m."""
    usual = st.one_of(
        st.integers(0, 2 * m // max(groups, 1) + 1),
        st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, m]),
        st.sampled_from([0, 1, -1, INT32_MAX, INT32_MIN, m]),
    )
    one = st.integers(0, max(groups - 1, 0)).map(lambda e: [m if i == e else 0 for i in range(groups)])
    return st.one_of(st.lists(usual, min_size=groups, max_size=groups), one).map(np.int32)
