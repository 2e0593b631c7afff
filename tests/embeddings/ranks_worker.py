"""One rank of the test of several processes; started by run_rank.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gem_embeddings import testing
from gem_embeddings.api import build_tables
from gem_embeddings.testing import SPECS, Quirks


def main(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    row_wise = {spec.name: "row_wise" for spec in SPECS}
    for impl, sharding in (("reference", None), ("torchrec", None), ("torchrec", row_wise)):

        def factory(specs, optimizer, seed, impl=impl, sharding=sharding):
            return build_tables(specs, optimizer=optimizer, seed=seed, impl=impl, sharding=sharding)

        testing.check_ranks(factory, Quirks(), rank, world_size)
        testing.check_start_values(factory, Quirks())
    dist.destroy_process_group()
