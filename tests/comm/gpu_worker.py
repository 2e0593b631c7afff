"""One GPU of test_gpu.py; started by run_rank.py."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from gem_comm.interface import Call
from gem_comm.peer_copy import PeerCopyCollectives
from gem_comm.testing import Quirks, check_rank
from gem_comm.torch_collectives import TorchCollectives


def main(rank: int, world_size: int, init_method: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        device_id=device,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    inner = TorchCollectives(group, axis="shard")
    comm = PeerCopyCollectives(inner, group=group, device=device)
    check_rank(inner, Quirks(device=str(device)))
    check_rank(comm, Quirks(device=str(device)))
    # growing sizes, many in flight behind a product on the caller's stream
    a = torch.randn(2048, 2048, device=device)
    for power in range(8, 23):
        x = torch.full((2**power,), float(rank * 100 + power), device=device)
        pending = [comm.start(Call(kind="all_gather", x=x + shift)) for shift in range(3)]
        a = torch.tanh(a @ a)
        for shift, one in enumerate(pending):
            found = one.wait().view(world_size, -1)
            expected = torch.tensor([[r * 100.0 + power + shift] for r in range(world_size)], device=device)
            assert torch.equal(found, expected.expand_as(found)), (power, shift)
    torch.cuda.synchronize()
    dist.destroy_process_group()
