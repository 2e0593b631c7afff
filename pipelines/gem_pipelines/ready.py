"""A step's batches before it is computed: agreed on by all ranks, and their ids on the way to the tables.

Both can happen while the step before is still computed, since neither reads a parameter or a table. So a trainer that
is told what comes next does it between forward and backward of the step at hand: the exchange of ids runs beside the
backward pass, and on CUDA the checks of the next batch, which are work of the host, beside the kernels of this one. The
lookup itself waits for the update of the step before: nothing is read that is older than in a run without this.

The tensors of a batch are laid into one buffer here, pinned where the device is CUDA, so that `on_device` moves it by
one transfer that does not wait. Where the model computes on the CPU nothing is moved: it reads the buffer itself.

What needs only this rank and its CPU (checks, sums, the packing) may be done by a thread (`begin_ready`) while the host
launches the kernels of the step at hand: those are calls into torch that hold no lock. A trainer does so on CUDA.

What is wrong with the next step's batches belongs to the next step: it is kept here, and raised there, on all ranks.

Cost: the ids of one more batch on the device; one copy of a batch in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from gem_data.interface import Batch, Schema
from gem_data.packing import PackedBatch, move_batch, pack_batch
from gem_embeddings.interface import Prepared, Tables

from gem_pipelines.agreement import Agreement, Examined, RemoteBatchError, StepTotals
from gem_pipelines.batches import BatchError, pad_empty
from gem_pipelines.errors import RemoteError
from gem_pipelines.lookup import join_ids

Coming = Sequence[Batch] | Exception
"""The batches of a step, or why they could not be read."""


def pack(batch: Batch, schema: Schema, *, pin: bool, dynamic: Collection[str] = ()) -> PackedBatch:
    """`batch`, a row of weight 0 where it has none, in one buffer on the CPU. dynamic: features of any integers."""
    return pack_batch(pad_empty(batch, schema, dynamic), pin=pin)


def place(packed: PackedBatch, device: torch.device) -> Batch:
    """The batch where the model computes, moved there by one transfer; on a CPU the packed one itself."""
    return packed.batch if device.type == "cpu" else move_batch(packed, device).batch


@dataclass(frozen=True, kw_only=True)
class Ready:
    """batches: as given; packed: as cut, none without rows, each in one buffer on the CPU; prepared: all their ids."""

    batches: Sequence[Batch]
    totals: StepTotals
    packed: tuple[PackedBatch, ...]
    prepared: Prepared

    def on_device(self, device: torch.device) -> list[Batch]:
        """The packed batches where the model computes, each moved by one transfer."""
        return [place(packed, device) for packed in self.packed]


@dataclass(frozen=True, kw_only=True)
class NotReady:
    """Why the step cannot be computed, on every rank (each its own error)."""

    coming: Coming
    error: Exception


Begun = Future[tuple[Examined, "tuple[PackedBatch, ...] | None"]]
"""What a rank makes ready by itself: what it finds of the batches, and the batches packed (None: not yet, or not)."""


def begin_ready(
    threads: ThreadPoolExecutor,
    coming: Sequence[Batch],
    *,
    agreement: Agreement,
    schema: Schema,
    device: torch.device,
    packs: bool = True,
    dynamic: Collection[str] = (),
) -> Begun:
    """Start on `coming` in a thread. device: whose memory is pinned; packs: False where ranks must first agree on how
    batches are cut.
    """

    def work() -> tuple[Examined, tuple[PackedBatch, ...] | None]:
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(device)  # a new thread would pin for device 0
        examined = agreement.examine(coming)
        sound = packs and examined.error is None
        if not sound:
            return examined, None
        return examined, tuple(pack(batch, schema, pin=on_cuda, dynamic=dynamic) for batch in coming)

    return threads.submit(work)


def make_ready(
    coming: Coming,
    *,
    step: int,
    agreement: Agreement,
    tables: Tables,
    schema: Schema,
    cut: Callable[[Sequence[Batch]], Sequence[Batch]],
    pin: bool = False,
    begun: Begun | None = None,
    dynamic: Collection[str] = (),
) -> Ready:
    """Agree on the batches of 1-based `step` and start the exchange of their ids. A collective.

    cut  micro-batches as they are given -> as they are computed, equally many on all ranks
    pin  in page-locked memory, for CUDA
    begun  what `begin_ready` gave for `coming`; None: everything is done now
    dynamic  features whose ids are any integers

    Raises what `Agreement.totals` raises, and for batches that could not be read what `Agreement.stop` raises.
    """
    if isinstance(coming, Exception):
        agreement.stop(coming, step=step)
    examined, packed = (None, None) if begun is None else begun.result()
    totals = agreement.totals(coming, step=step, examined=examined)
    if packed is None:
        packed = tuple(pack(batch, schema, pin=pin, dynamic=dynamic) for batch in cut(coming))
    prepared = tables.prepare(join_ids([held.batch.ids for held in packed]))
    return Ready(batches=coming, totals=totals, packed=packed, prepared=prepared)


def try_ready(coming: Coming, *, step: int, agreement: Agreement, **parts: object) -> Ready | NotReady:
    """`make_ready` for a later step: what it raises is kept."""
    try:
        return make_ready(coming, step=step, agreement=agreement, **parts)  # type: ignore[arg-type]
    except (BatchError, RemoteBatchError, RemoteError) as error:
        return NotReady(coming=coming, error=error)
    except Exception as error:
        if error is not coming:
            raise
        return NotReady(coming=coming, error=error)
