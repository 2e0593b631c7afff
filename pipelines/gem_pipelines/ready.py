"""A step's batches before it is computed: agreed on by all ranks, and their ids on the way to the tables.

Both can happen while the step before is still computed, since neither reads a parameter or a table. So a trainer that
is told what comes next does it between forward and backward of the step at hand: the exchange of ids runs beside the
backward pass, and on CUDA the checks of the next batch, which are work of the host, beside the kernels of this one. The
lookup itself waits for the update of the step before: nothing is read that is older than in a run without this.

What is wrong with the next step's batches belongs to the next step: it is kept here, and raised there, on all ranks.

Cost: the ids of one more batch on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gem_data.interface import Batch, Schema
from gem_embeddings.interface import Prepared, Tables

from gem_pipelines.agreement import Agreement, RemoteBatchError, StepTotals
from gem_pipelines.batches import BatchError, pad_empty
from gem_pipelines.errors import RemoteError
from gem_pipelines.lookup import join_ids

Coming = Sequence[Batch] | ValueError
"""The batches of a step, or why they could not be read."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """batches: as given; padded: as cut, no batch without rows, on the CPU; prepared: all their ids."""

    batches: Sequence[Batch]
    totals: StepTotals
    padded: tuple[Batch, ...]
    prepared: Prepared


@dataclass(frozen=True, kw_only=True)
class NotReady:
    """Why the step cannot be computed, on every rank (each its own error)."""

    coming: Coming
    error: Exception


def make_ready(
    coming: Coming,
    *,
    step: int,
    agreement: Agreement,
    tables: Tables,
    schema: Schema,
    cut: Callable[[Sequence[Batch]], Sequence[Batch]],
) -> Ready:
    """Agree on the batches of 1-based `step` and start the exchange of their ids. A collective.

    cut  micro-batches as they are given -> as they are computed, equally many on all ranks

    Raises what `Agreement.totals` raises, and for batches that could not be read what `Agreement.stop` raises.
    """
    if isinstance(coming, ValueError):
        agreement.stop(coming, step=step)
    totals = agreement.totals(coming, step=step)
    padded = tuple(pad_empty(batch, schema) for batch in cut(coming))
    prepared = tables.prepare(join_ids([batch.ids for batch in padded]))
    return Ready(batches=coming, totals=totals, padded=padded, prepared=prepared)


def try_ready(coming: Coming, *, step: int, agreement: Agreement, **parts: object) -> Ready | NotReady:
    """`make_ready` for a later step: what it raises is kept."""
    try:
        return make_ready(coming, step=step, agreement=agreement, **parts)  # type: ignore[arg-type]
    except (BatchError, RemoteBatchError, RemoteError) as error:
        return NotReady(coming=coming, error=error)
    except ValueError as error:
        if error is not coming:
            raise
        return NotReady(coming=coming, error=error)
