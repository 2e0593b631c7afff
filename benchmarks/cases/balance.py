"""Balance: dividing a global batch among ranks, moving base batches, and packing rows for the exchange."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cases.case import Case
from cases.data import with_equal_lengths
from cases.memory import count_all

RANKS, SAMPLES = 64, 256
BASE_BATCH, SHARE, POOL = 128, 256, 256
ROWS, PARTS = 256, 4


def make_loads(*, rows: int) -> Any:
    """Loads of long-tailed rows, as gem_data.simulate draws them."""
    from gem_data.simulate import long_tailed_loads

    return long_tailed_loads(rows, seed=3)


def divide(loads: Any, *, method: str) -> Any:
    """The rows of every rank."""
    from gem_data.api import partition

    return partition(loads, RANKS, method=method)


def check_division(loads: Any, found: Any) -> None:
    """Every row once, as many a rank, and the heaviest rank at most 1.02 of the mean."""
    import numpy as np
    from gem_data.api import imbalance

    assert [len(rows) for rows in found] == [SAMPLES] * RANKS
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(len(loads)))
    assert imbalance([loads[rows].sum() for rows in found]) <= 1.02


def unevenness(loads: Any, *, method: str) -> dict[str, int]:
    """By how many millionths the heaviest rank lies above the mean."""
    from gem_data.api import imbalance

    rows = divide(loads, method=method)
    return {"uneven_millionths": round(1e6 * (imbalance([loads[part].sum() for part in rows]) - 1.0))}


def move(loads: Any) -> Any:
    """The order of one shard's window."""
    from gem_data.balance import base_batch_order

    return base_batch_order(loads, base_batch=BASE_BATCH, share=SHARE, first=0, pool=POOL, key=(0, 0))


def check_moved(loads: Any, order: Any) -> None:
    """Every row once, base batches whole, and shares more alike than they were."""
    import numpy as np
    from gem_data.api import imbalance

    assert np.array_equal(np.sort(order), np.arange(len(loads)))
    blocks = order.reshape(-1, BASE_BATCH)
    assert np.array_equal(blocks, blocks[:, :1] + np.arange(BASE_BATCH))
    assert not (blocks[:, 0] % BASE_BATCH).any()
    before, after = (imbalance(values.reshape(-1, SHARE).sum(axis=1)) for values in (loads, loads[order]))
    assert after < before, (before, after)


def unevenness_of_shares(loads: Any) -> dict[str, int]:
    """By how many millionths the heaviest share lies above the mean."""
    from gem_data.api import imbalance

    return {"uneven_millionths": round(1e6 * (imbalance(loads[move(loads)].reshape(-1, SHARE).sum(axis=1)) - 1.0))}


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A batch, and which of its rows go to which rank."""

    schema: Any
    batch: Any
    takes: Any


def make_batch(*, shape: str) -> Batches:
    """256 rows with every kind of column for four ranks; uniform: every list has the length 8."""
    import numpy as np
    from gem_data.api import batch_from_table
    from gem_data.testing import tiny_schema, tiny_table

    table = tiny_table(rows=ROWS, seed=5)
    if shape == "uniform":
        table = with_equal_lengths(table, 8)
    order = np.random.default_rng(0).permutation(ROWS)
    return Batches(
        schema=tiny_schema(), batch=batch_from_table(tiny_schema(), table), takes=np.array_split(order, PARTS)
    )


def exchange(inputs: Batches) -> Any:
    """Pack the rows of every rank, and make one batch of all that came."""
    from gem_data.exchange import pack_rows, rows_of_batch, unpack_rows

    rows = rows_of_batch(inputs.schema, inputs.batch)
    buffers = [pack_rows(inputs.schema, rows, take) for take in inputs.takes]
    counts = [len(take) for take in inputs.takes]
    return unpack_rows(inputs.schema, buffers, counts, global_rows=ROWS, step=0)


def check_exchanged(inputs: Batches, batch: Any) -> None:
    """The rows that were sent, in the order of sending."""
    import numpy as np
    from gem_data.exchange import take_rows
    from gem_data.testing import batch_difference

    wanted = take_rows(inputs.schema, inputs.batch, np.concatenate(inputs.takes))
    assert batch_difference(batch, wanted) is None


def sent_bytes(inputs: Batches) -> dict[str, int]:
    """Bytes of all packed rows."""
    from gem_data.exchange import row_bytes

    return {"sent_bytes": int(row_bytes(inputs.schema, inputs.batch).sum())}


CASES = (
    *(
        Case(
            name=f"data.partition_{method}",
            make=partial(make_loads, rows=RANKS * SAMPLES),
            run=partial(divide, method=method),
            check=check_division,
            count=count_all,
            formula=partial(unevenness, method=method),
            repeat=40,
        )
        for method in ("lpt", "kk")
    ),
    Case(
        name="data.base_batch_order",
        make=partial(make_loads, rows=POOL * BASE_BATCH),
        run=move,
        check=check_moved,
        count=count_all,
        formula=unevenness_of_shares,
        repeat=100,
    ),
    *(
        Case(
            name=f"data.exchange_{shape}",
            make=partial(make_batch, shape=shape),
            run=exchange,
            check=check_exchanged,
            count=count_all,
            formula=sent_bytes,
            repeat=100,
        )
        for shape in ("ragged", "uniform")
    ),
)
