"""A gloo group of this one process, for cases that need an initialised group."""

from __future__ import annotations


def ensure_world_of_one() -> None:
    """Initialise the default group unless there is one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
