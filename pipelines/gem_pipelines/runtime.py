"""The processes of a run: rank, device, process group, and the few exchanges the job needs.

A process group exists at world size 1 too (over an in-memory store, no network), so that one and many processes run
the same lines. Under torchrun the group comes from its environment. Only tensors cross ranks: objects travel as UTF-8
bytes, never as pickles.

Cost: the exchanges here carry tens of numbers a step, and predictions once per evaluation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gem_pipelines.errors import RemoteError, RunError, told
from gem_pipelines.meeting import meet


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where this process stands. `device` is the one that computes; `timeout` is how long a collective may take (None:
    as torch has it).
    """

    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta | None = None

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, a new tensor on the same device. Numbers on the CPU go over gloo: what the host
        must know does not wait for what the device has still to do.
        """
        total = values.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks, a new tensor on the same device."""
        total = values.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total

    def gather(self, values: Tensor) -> Tensor:
        """(n,) on every rank -> (world, n) in rank order, on the same device."""
        if self.world_size == 1:
            return values.detach()[None]
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(parts, values.detach().contiguous())
        return torch.stack(parts)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Rows of all ranks, in rank order, on every rank. The ranks' numbers of rows may differ and may be 0.

        Rank 0 with rows [1, 2, 3] and rank 1 with [] both receive [1, 2, 3]: counts are exchanged first, then padded
        rows.
        """
        if self.world_size == 1:
            return rows
        local = rows.to(self.device).contiguous()
        count = torch.tensor([local.shape[0]], dtype=torch.int64, device=self.device)
        counts = [torch.empty_like(count) for _ in range(self.world_size)]
        dist.all_gather(counts, count)
        sizes = [int(c) for c in counts]
        if max(sizes) == 0:
            return rows
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(rows.device)

    def gather_text(self, text: str) -> list[str]:
        """One text from every rank, on every rank."""
        data = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        )
        sizes = self.gather_rows(torch.tensor([data.numel()], dtype=torch.int64)).tolist()
        everything = bytes(self.gather_rows(data).tolist())
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [everything[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]

    def from_main(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return self.gather_text(text if self.is_main else "")[0]

    def on_main(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the others wait. What it raises as a user's mistake is raised on every rank."""
        error: Exception | None = None
        if self.is_main:
            try:
                action()
            except (ValueError, OSError) as problem:
                error = problem
        text = self.from_main(f"{type(error).__name__}: {error}" if error is not None else "")
        if error is not None:
            raise error
        if text:
            raise RemoteError(f"rank 0 reported: {text}")

    def agree(self, error: Exception | None, *, what: str) -> None:
        """Raise on every rank where one has an error: it raises its own, the others repeat it. A collective."""
        if not float(self.sum(torch.tensor(float(error is not None)))):
            return
        texts = self.gather_text("" if error is None else told(error))
        if error is not None:
            raise error
        rank = next(rank for rank, text in enumerate(texts) if text)
        raise RemoteError(f"{what}: rank {rank} reported: {texts[rank]}")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def launched_by_torchrun() -> bool:
    """True where torchrun (or a launcher with its environment) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """ "auto" is CUDA where present, else the CPU. Asking for CUDA where there is none is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise RunError(
                "train.device is 'cuda' but torch sees no CUDA device; use --train.device cpu, or see 'gemline doctor'"
            )
        if local_rank >= torch.cuda.device_count():
            raise RunError(
                f"local rank {local_rank} has no GPU of its own: torch sees {torch.cuda.device_count()}; "
                "start at most that many processes on this host"
            )
        return torch.device("cuda", local_rank)
    return torch.device(name)


def start_runtime(*, device: str, threads: int | None, deterministic: bool, timeout: timedelta) -> Runtime:
    """Join (or, alone, make) the process group, and set this process's threads and determinism."""
    rank = int(os.environ.get("RANK", "0")) if launched_by_torchrun() else 0
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if launched_by_torchrun() else 1
    chosen = choose_device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")) if launched_by_torchrun() else 0)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    # Filling fresh memory with NaN would find uninitialised values; it costs a pass and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False
    backend = "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        backend = "cpu:gloo,cuda:nccl"
        if deterministic:
            # cuBLAS wants its workspace fixed, and torch refuses deterministic products without; read at the first one
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if dist.is_initialized():
        raise RunError("a process group exists already in this process: one run per process")
    # TorchRec makes torch.fx say on every start that one of its functions will be renamed.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    if launched_by_torchrun():
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            agent = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
            store = meet(agent, rank=rank, world_size=world_size, timeout=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return Runtime(rank=rank, world_size=world_size, device=chosen, timeout=timeout)
