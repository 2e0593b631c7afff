"""Stochastic length: how many of its latest events a row keeps in an epoch.

Attention costs the square of the length, and the long rows of a long-tailed data set cost most of a step. Stochastic
length (HSTU, arXiv 2402.17152) bounds that: with N the longest stream and alpha in [1, 2], a row of L
events is cut to M = N^(alpha/2) where L > M, but stays whole with probability N^alpha / L^2, so that pairs of a long
row are N^alpha in expectation, times at most two, and the model has seen whole rows when it is evaluated on them.

    N = 100, alpha = 1.5: M = 31; rows of 31 events and fewer stay, a row of 100 stays whole in 1000 of 10,000 epochs

What is kept are the latest events, as with max_length, so a row stays one run of consecutive bytes. (The paper samples
the events; the latest ones are the choice that it names greedy selection.)

The draw is a hash of (seed, epoch, stream, file, row group, row): the same at any world size, batch size and place to
resume from. Cost: a few passes over R numbers a stream, once a window.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from gem_data.batching import LENGTHS, extend_hash, hash_key
from gem_data.interface import LoaderConfig, Schema
from gem_data.rows import Int64, Rows


def drawn_limits(schema: Schema, rows: Rows, config: LoaderConfig, epoch: int) -> tuple[Int64, ...] | None:
    """One (R,) array a stream: the most events that each row keeps. None where nothing is drawn."""
    alpha = config.stochastic_length
    if alpha is None:
        return None
    found = []
    for stream, events in zip(schema.streams, rows.streams, strict=True):
        longest = stream.max_length if config.max_length is None else min(stream.max_length, config.max_length)
        lengths = np.minimum(np.diff(events.offsets), longest)
        uniform = uniform_of_rows(rows.origin, config.seed, epoch, stream.name)
        short = int(longest ** (alpha / 2))
        whole = (lengths <= short) | (uniform * lengths.astype(np.float64) ** 2 < longest**alpha)
        found.append(np.where(whole, longest, short))
    return tuple(found)


def uniform_of_rows(origin_R3: Int64, seed: int, epoch: int, stream: str) -> npt.NDArray[np.float64]:
    """(R,) numbers in [0, 1), one for each place (file, row group, row)."""
    state = hash_key(seed, epoch, LENGTHS, xxhash.xxh3_64_intdigest(stream.encode()))
    hashes = np.full(len(origin_R3), state, np.uint64)
    for column in range(3):
        hashes = extend_hash(hashes, origin_R3[:, column])
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
