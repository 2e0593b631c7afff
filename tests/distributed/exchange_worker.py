"""One rank: the exchanges of Runtime with unequal and empty parts. A failure is a traceback."""

from __future__ import annotations

from datetime import timedelta

import torch
from gem_pipelines.runtime import start_runtime


def main() -> None:
    runtime = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=20))
    rank, world = runtime.rank, runtime.world_size
    assert world == 2
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) if rank == 0 else torch.zeros(0, 2)
    assert runtime.gather_rows(rows).tolist() == [[1, 2], [3, 4], [5, 6]]
    ids = torch.arange(rank + 1, dtype=torch.int64) + 10 * rank
    assert runtime.gather_rows(ids).tolist() == [0, 10, 11]
    assert runtime.gather_rows(torch.zeros(0, 3)).shape == (0, 3)
    assert runtime.gather_text("" if rank == 0 else "grün") == ["", "grün"]
    assert runtime.from_main(f"rank {rank}") == "rank 0"
    assert runtime.from_main("" if rank == 0 else "lost") == ""
    assert runtime.sum(torch.tensor([1.5, float(rank)], dtype=torch.float64)).tolist() == [3.0, 1.0]
    ran = []
    runtime.on_main(lambda: ran.append(rank))
    assert ran == ([0] if rank == 0 else [])
    raised = ""
    try:
        runtime.on_main(lambda: int("seven"))
    except ValueError as error:
        raised = str(error)
    assert raised.startswith("invalid literal" if rank == 0 else "rank 0 reported: ValueError: invalid literal"), raised
    runtime.barrier()
    runtime.close()
    if rank == 0:
        print("all exchanges agree")
