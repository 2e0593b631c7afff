"""Measures how long a trainer waits for its batches, and how many samples a second reading gives, by number of readers.

    python -m gem_data.waits [DIRECTORY] [--split train] [--batch 256] [--readers 0 1 2] [--slower 3] [--rows 24000]

The trainer sleeps, as one does that waits for its GPU: `slower` times as long as reading alone needs for a batch
(processor seconds of one thread, measured first). So whatever it waits for beyond the first batch is not for want of
speed, but because something was begun too late. Rates are those of a consumer that does nothing, by the clock, the
first batch included. Without a directory a data set of throughput.py is generated, in row groups of 1,000 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from gem_data.api import build_loader
from gem_data.interface import LoaderConfig
from gem_data.throughput import write_generated


def processor_seconds(directory: str | Path, *, split: str, config: LoaderConfig) -> float:
    """Of an epoch that is read in line, a batch."""
    loader = build_loader(directory, split=split, config=dataclasses.replace(config, prefetch=0, readers=0))
    started = time.process_time()
    batches = sum(1 for _ in loader.epoch())
    return (time.process_time() - started) / batches


def measure_waits(directory: str | Path, *, split: str, config: LoaderConfig, step_s: float) -> dict[str, Any]:
    """One epoch of a trainer that sleeps `step_s` a step.

    {"first_ms": until the first batch, "waited_ms": for all others, "longest_ms": the longest of those,
     "long": how many of them were over half a step, "share": waited of all the time behind the first batch}
    """
    loader, waits = build_loader(directory, split=split, config=config), []
    batches = loader.epoch()
    while True:
        started = time.perf_counter()
        if next(batches, None) is None:
            break
        waits.append(time.perf_counter() - started)
        time.sleep(step_s)
    first, *others = waits
    waited = sum(others)
    return {
        "first_ms": first * 1e3,
        "waited_ms": waited * 1e3,
        "longest_ms": max(others, default=0.0) * 1e3,
        "long": sum(wait > step_s / 2 for wait in others),
        "share": waited / (waited + len(waits) * step_s),
    }


def measure_rate(directory: str | Path, *, split: str, config: LoaderConfig, repeats: int = 3) -> float:
    """Samples a second of whole epochs that nobody trains on, by the clock: the best of the repeats."""
    best = 0.0
    for _ in range(repeats):
        loader = build_loader(directory, split=split, config=config)
        started = time.perf_counter()
        samples = sum(len(batch.sample_ids) for batch in loader.epoch())
        best = max(best, samples / (time.perf_counter() - started))
    return best


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", help="a data set; default: one is generated")
    parser.add_argument("--split", default="train")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--slower", type=float, default=3.0, help="the trainer's step in times of a batch's reading")
    parser.add_argument("--rows", type=int, default=24_000, help="rows to generate")
    parser.add_argument("--repeats", type=int, default=3, help="of the rate; the best counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        directory, split = arguments.directory, arguments.split
        if directory is None:
            directory = f"{parent}/generated"
            write_generated(directory, rows=arguments.rows, rows_per_group=1000)
        config = LoaderConfig(global_batch_size=arguments.batch)
        batch_s = processor_seconds(directory, split=split, config=config)
        step_s = arguments.slower * batch_s
        print(f"a batch: {batch_s * 1e3:.2f} ms of one processor; the trainer's step: {step_s * 1e3:.2f} ms")
        for readers in arguments.readers:
            here = dataclasses.replace(config, readers=readers)
            rate = measure_rate(directory, split=split, config=here, repeats=arguments.repeats)
            found = measure_waits(directory, split=split, config=here, step_s=step_s)
            print(
                f"readers {readers}: {rate:,.0f} samples/s; the trainer waits {found['first_ms']:.1f} ms for the first "
                f"batch and {found['waited_ms']:.1f} ms for the others ({found['share']:.1%}), at most "
                f"{found['longest_ms']:.1f} ms, {found['long']} times over half a step"
            )


if __name__ == "__main__":
    main()
