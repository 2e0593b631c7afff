"""One rank of the test of several processes: python ranks_worker.py RANK WORLD_SIZE PORT."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from gem_embeddings import testing
from gem_embeddings.api import build_tables
from gem_embeddings.testing import SPECS, Quirks


def main(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    row_wise = {spec.name: "row_wise" for spec in SPECS}
    for impl, sharding in (("reference", None), ("torchrec", None), ("torchrec", row_wise)):

        def factory(specs, optimizer, seed, impl=impl, sharding=sharding):
            return build_tables(specs, optimizer=optimizer, seed=seed, impl=impl, sharding=sharding)

        testing.check_ranks(factory, Quirks(), rank, world_size)
        testing.check_start_values(factory, Quirks())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
