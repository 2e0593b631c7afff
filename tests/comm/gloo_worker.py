"""One rank of the tests of several processes, with the names of its checks; started by run_rank.py."""

from __future__ import annotations

import torch
import torch.distributed as dist


def main(rank: int, world_size: int, init_method: str, *checks: str) -> None:
    import gloo_checks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    for check in checks:
        getattr(gloo_checks, check)(rank, world_size)
    dist.destroy_process_group()
