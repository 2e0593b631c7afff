"""One rank of the tests of several processes: python gloo_worker.py RANK WORLD_SIZE PORT CHECK..."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def main(rank: int, world_size: int, port: int, checks: list[str]) -> None:
    import gloo_checks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    for check in checks:
        getattr(gloo_checks, check)(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
