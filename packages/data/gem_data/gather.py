"""Gathers jagged rows: the events of chosen rows of a (values, offsets) column, each row one copy of consecutive bytes.

An index per event, which numpy.take wants, is as long as the data it moves. Arrow's take over a *binary* array copies a
row's bytes at once, so the events of a row are described to it as one binary value: offsets in bytes, built for the
chosen rows alone. They are put in the order of their places, because a binary array's values lie one behind the other;
what lies between two chosen rows, and the older events that a row is cut by, are values that are not taken.

    offsets [0, 2, 2, 5], rows [2, 0], at most 2 events: spans 24..40 and 0..16 bytes, in order of place 0 16 24 40,
    of which values 2 and 0 are taken

Measured on rows of 158 events on average, 256 of 12,000: 13 us a column where numpy.take needs 22 and its indices 41
once. It runs on the calling thread only. No values are checked: offsets come from `Rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_data.rows import Int64


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Rows of one jagged group, shared by its parallel columns. lengths (n,): events of every row; total: their sum."""

    lengths: Int64
    total: int
    bounds: pa.Buffer
    values: int
    places: pa.Array


def choose(offsets: Int64, take: Int64, limit: int | Int64 | None) -> Chosen:
    """Rows `take` of a group with `offsets`, each cut to its latest `limit` events: one number, or (n,) of them.

    >>> choose(np.array([0, 2, 2, 5]), np.array([2, 0]), 2).lengths.tolist()
    [2, 2]
    """
    ends = offsets[take + 1]
    lengths = ends - offsets[take]
    if limit is not None:
        np.minimum(lengths, limit, out=lengths)
    order = np.argsort(take, kind="stable")
    bounds = np.empty(2 * len(take), np.int64)
    bounds[0::2] = (ends - lengths)[order]
    bounds[1::2] = ends[order]
    bounds *= 8
    places = np.empty(len(take), np.int64)
    places[order] = np.arange(0, 2 * len(take), 2)
    return Chosen(
        lengths=lengths,
        total=int(lengths.sum()),
        bounds=pa.py_buffer(bounds),
        values=max(2 * len(take) - 1, 0),
        places=pa.array(places),
    )


def gather(source: Int64, chosen: Chosen, out: Int64) -> None:
    """The events of the chosen rows of one column into `out`, which has chosen.total places."""
    if not chosen.total:
        return
    flat = np.ascontiguousarray(source)
    rows = pa.Array.from_buffers(pa.large_binary(), chosen.values, [None, chosen.bounds, pa.py_buffer(flat)])
    taken = pc.take(rows, chosen.places, boundscheck=False)
    out[:] = np.frombuffer(taken.buffers()[2], np.int64, chosen.total)
