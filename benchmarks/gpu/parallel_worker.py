"""Starts parallel_rank.py where packages that only reading data needs may be absent.

A bare GPU host has torch, TorchRec, FBGEMM and numpy. The modules of a training step import, on the way, what reads
and writes files; nothing of that is called here. So what is absent is stood in for by empty objects, said aloud and in
the results; a call into one of them would give nonsense that parity would show.
"""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock

READERS = (
    "pyarrow",
    "pyarrow.parquet",
    "pyarrow.compute",
    "pyarrow.dataset",
    "xxhash",
    "safetensors",
    "safetensors.torch",
)


def stand_in() -> list[str]:
    """Put an empty object in place of every reader that is absent; their names."""
    absent = []
    for name in READERS:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock(name=name)
            absent.append(name)
    return absent


if __name__ == "__main__":
    import torchrec  # noqa: F401  asks whether pyarrow is there: before an empty object answers

    absent = stand_in()
    if absent:
        print(f"absent, not needed here, and stood in for: {', '.join(absent)}", flush=True)
    import parallel_rank

    parallel_rank.main(absent)
