"""Simulates how uneven ranks are, before and after balancing, on long-tailed lengths: no files, no processes.

    python -m gem_data.simulate [--steps 128]

Lengths are exp(normal) around a median of 768, cut to 32 to 4096; the load of a row is that of one HSTU layer of width
512, forward and backward: 7.86e6 L + 3584 L^2. Every rank reads its own rows in random order. Printed is max over mean
of the ranks' loads, the mean over steps: before; after `partition` over ranks (equal counts); and after base-batch
shuffling inside each rank (base batches of 128 where a share holds two, else of 8; pools of 256 base batches): in
windows that hold the pool, and in windows of 2,200 rows, which 8 row groups of 8 MiB hold of rows that
have such lengths in one stream of one field.

    python -m gem_data.simulate --loader [--steps 64]

measures the same with files and the loader of every rank (simulate_loader.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from gem_data.balance import Float64, base_batch_order, imbalance, partition
from gem_data.interface import LoaderConfig

SMALL_WINDOW = 2200
POOL = 256


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """Mean over steps of max over mean. small_windows: base batches that are moved within SMALL_WINDOW rows."""

    ranks: int
    rows: int
    before: float
    across_ranks: float
    base_batch: int
    base_batches: float
    small_windows: float


def long_tailed_loads(rows: int, *, seed: int) -> Float64:
    """(rows,) loads as the module docstring says."""
    lengths = np.clip(np.round(768 * np.exp(np.random.default_rng(seed).standard_normal(rows))), 32, 4096)
    loads: Float64 = 7.86e6 * lengths + 3584.0 * lengths**2
    return loads


def simulate(*, ranks: int, rows: int, steps: int, seed: int = 0) -> Uneven:
    """`rows` a rank and step."""
    base = 128 if rows >= 256 else 8
    loads = [long_tailed_loads(rows * steps, seed=seed * 1000 + rank) for rank in range(ranks)]
    before = np.stack([rank.reshape(steps, rows) for rank in loads])
    together = [before[:, step].reshape(-1) for step in range(steps)]
    return Uneven(
        ranks=ranks,
        rows=rows,
        before=_mean_imbalance(before),
        across_ranks=float(np.mean([imbalance([x[part].sum() for part in partition(x, ranks)]) for x in together])),
        base_batch=base,
        base_batches=_shuffled(loads, rows=rows, base_batch=base, window=max(POOL * base, SMALL_WINDOW), seed=seed),
        small_windows=_shuffled(loads, rows=rows, base_batch=base, window=SMALL_WINDOW, seed=seed),
    )


def _shuffled(loads: list[Float64], *, rows: int, base_batch: int, window: int, seed: int) -> float:
    """Mean imbalance of shares of `rows` after base batches were moved inside windows of `window` rows of each rank."""
    moved = []
    for number, rank in enumerate(loads):
        parts = [(start, rank[start : start + window]) for start in range(0, len(rank), window)]
        orders = [
            base_batch_order(part, base_batch=base_batch, share=rows, first=start, pool=POOL, key=(seed, number, start))
            for start, part in parts
        ]
        held = [part[order] for (_, part), order in zip(parts, orders, strict=True)]
        moved.append(np.concatenate(held).reshape(-1, rows))
    return _mean_imbalance(np.stack(moved))


def _mean_imbalance(loads: Float64) -> float:
    """loads: (ranks, steps, rows)."""
    return float(np.mean([imbalance(step) for step in loads.sum(axis=2).T]))


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default 128; with --loader 64")
    parser.add_argument("--loader", action="store_true", help="write a data set and measure with the real loader")
    arguments = parser.parse_args()
    if arguments.loader:
        _print_measured(arguments.steps or 64)
        return
    steps = arguments.steps or 128
    print(f"ranks  rows  before  across ranks  base batches (of)  in windows of {SMALL_WINDOW} rows")
    for rows in (32, 256):
        for ranks in (2, 8, 64):
            found = simulate(ranks=ranks, rows=rows, steps=steps)
            print(
                f"{ranks:5d}  {rows:4d}  {found.before:6.3f}  {found.across_ranks:12.4f}  "
                f"{found.base_batches:12.3f} ({found.base_batch:3d})  {found.small_windows:10.3f}"
            )


def _print_measured(steps: int) -> None:
    from gem_data import simulate_loader

    default, large = (
        groups * simulate_loader.GROUP_ROWS for groups in (LoaderConfig.window_groups, simulate_loader.LARGE_WINDOW)
    )
    print(f"ranks  rows  before  across ranks  base batches (of) in windows of {default} rows  of {large} rows")
    for ranks in (2, 8, 64):
        for found in simulate_loader.measure(ranks=ranks, rows=(32, 256), steps=steps):
            print(
                f"{ranks:5d}  {found.rows:4d}  {found.before:6.3f}  {found.across_ranks:12.4f}  "
                f"{found.default_window:12.3f} ({found.base_batch:3d})  {found.large_window:10.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
