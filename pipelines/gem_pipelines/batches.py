"""What is checked of a batch before anything changes, and the padding row of an empty rank.

The update of the tables is part of backward, and BCE accepts a label of 7 without complaint: what is wrong must be
found before the forward pass. The loader checks what it reads from Parquet; this check guards the step itself,
whatever the loader, and is what makes a step transactional. It runs on the CPU, before the batch moves to the device,
in a few vectorised passes.

Legend: B rows, T tasks, K id features, N values.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from gem_data.interface import Batch, EventStream, Schema
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FLOATS = ("labels", "weights", "dense")
INTEGERS = (torch.int64, torch.int32)


class BatchError(ValueError):
    """A batch that must not be trained: names feature, row, sample id and place in the data."""


def check_batch(batch: Batch, schema: Schema, *, open_ids: Collection[str] = ()) -> None:
    """Raise BatchError at the first label, weight, dense value, id or offset that is wrong. Changes nothing.

    open_ids: features whose ids may lie outside their table.
    """
    rows = batch.sample_ids.numel()
    tasks = [label.name for label in schema.labels]
    for name in ("sample_ids", "user_ids", "timestamps"):
        _check_shape(getattr(batch, name), (rows,), name)
    _check_shape(batch.row_index, (rows, 3), "row_index")
    _check_shape(batch.labels, (rows, len(tasks)), "labels")
    _check_shape(batch.weights, (rows, len(tasks)), "weights")
    _check_shape(batch.dense, (rows, len(schema.dense)), "dense")
    _check_requests(batch, schema, rows)
    labels_BT, weights_BT = batch.labels, batch.weights
    binary = (labels_BT == 0) | (labels_BT == 1)
    _check_cells(batch, schema, labels_BT, kind="label", names=tasks, good=binary, expected="0 or 1")
    finite = torch.isfinite(weights_BT) & (weights_BT >= 0)
    _check_cells(batch, schema, weights_BT, kind="weight", names=tasks, good=finite, expected="finite and at least 0")
    finite = torch.isfinite(batch.dense)
    _check_cells(batch, schema, batch.dense, kind="dense", names=schema.dense, good=finite, expected="finite")
    _check_ids(batch, schema, rows, open_ids)
    _check_streams(batch, schema)


def _check_requests(batch: Batch, schema: Schema, impressions: int) -> None:
    """Offsets of requests where rows are requests, and ids of the request in its first impression's row alone."""
    offsets = batch.requests
    if (offsets is not None) != bool(schema.impression):
        rows = "plain rows" if offsets is None else "requests"
        raise BatchError(f"batch has {rows}, the data {'have requests' if offsets is None else 'are plain samples'}")
    if offsets is None:
        return
    if offsets.dtype not in INTEGERS or offsets.ndim != 1 or not offsets.numel():
        raise BatchError(f"batch requests are {offsets.dtype} in {offsets.ndim} dims, expected int64 in one, not empty")
    if int(offsets[0]) or int(offsets[-1]) != impressions or bool((offsets.diff() < 1).any()):
        raise BatchError(
            f"batch requests: expected offsets from 0 to the {impressions} impressions, each request having one or "
            f"more; came {offsets.tolist()[:8]}{'...' if offsets.numel() > 8 else ''}"
        )
    keys, lengths = list(batch.ids.keys()), batch.ids.lengths()
    if lengths.numel() != len(keys) * impressions:
        return  # told by _check_ids
    later = torch.ones(impressions, dtype=torch.bool)
    later[offsets[:-1]] = False
    lengths_KB = lengths.view(len(keys), impressions)
    for key in schema.request_keys():
        wrong = torch.nonzero((lengths_KB[keys.index(key)] > 0) & later) if key in keys else offsets[:0]
        if wrong.numel():
            row = int(wrong[0])
            raise BatchError(
                f"feature {key!r} stands once in a request, in the row of its first impression; it has ids in that of "
                f"a later one{_place(batch, schema, row)}"
            )


def _check_shape(tensor: Tensor, expected: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != expected:
        raise BatchError(f"batch {name} has shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.is_floating_point() != (name in FLOATS):
        raise BatchError(f"batch {name} are {tensor.dtype}, expected {'floats' if name in FLOATS else 'integers'}")


def _check_cells(
    batch: Batch,
    schema: Schema,
    values: Tensor,
    *,
    kind: str,
    names: list[str] | tuple[str, ...],
    good: Tensor,
    expected: str,
) -> None:
    if bool(good.all()):
        return
    row, column = (int(i) for i in torch.nonzero(~good)[0])
    value = float(values[row, column])
    raise BatchError(f"{kind}.{names[column]} is {value}, expected {expected}{_place(batch, schema, row)}")


def _place(batch: Batch, schema: Schema, row: int) -> str:
    """Where row `row` of the batch came from."""
    file, group, inside = (int(i) for i in batch.row_index[row])
    path = schema.files[file].path if 0 <= file < len(schema.files) else f"file {file}"
    sample = int(batch.sample_ids[row])
    return f" (sample_id {sample}: {path}, row group {group}, row {inside}); nothing of this batch was trained"


def _check_ids(batch: Batch, schema: Schema, rows: int, open_ids: Collection[str]) -> None:
    features, table_rows = schema.id_features(), schema.table_rows()
    ids = batch.ids
    expected = [name for name, _ in features]
    if list(ids.keys()) != expected:
        raise BatchError(f"batch ids have keys {list(ids.keys())}, expected {expected}")
    _check_form(ids)
    lengths = ids.lengths()
    if lengths.numel() != rows * len(features) or (lengths.numel() and int(lengths.min()) < 0):
        raise BatchError(
            f"batch ids have {lengths.numel()} lengths, expected {len(features)} features x {rows} rows, none negative"
        )
    lengths_KB = lengths.view(len(features), rows)
    totals = lengths_KB.sum(1).tolist()
    values = ids.values()
    if sum(totals) != values.numel():
        raise BatchError(f"batch ids have {values.numel()} values, but their lengths sum to {sum(totals)}")
    for key, (name, table) in enumerate(features):
        if name in open_ids:
            continue
        part = values[sum(totals[:key]) : sum(totals[: key + 1])]
        limit = table_rows[table]
        if part.numel() and not (int(part.min()) >= 0 and int(part.max()) < limit):
            position = int(torch.nonzero((part < 0) | (part >= limit))[0])
            row = int(torch.searchsorted(lengths_KB[key].cumsum(0), position, right=True))
            raise BatchError(
                f"id {int(part[position])} of feature {name!r} is outside its table {table!r}: "
                f"expected 0 <= id < {limit}{_place(batch, schema, row)}"
            )


def _check_form(ids: KeyedJaggedTensor) -> None:
    """Ids are whole numbers, one number of rows for all features, no weights: floats above 2^24 would be other ids."""
    if ids.variable_stride_per_key():
        raise BatchError("batch ids have another number of rows for each feature, expected one for all")
    if ids.weights_or_none() is not None:
        raise BatchError("batch ids have weights, which no table of this model uses; leave them out")
    for name, tensor in (("values", ids.values()), ("lengths", ids.lengths())):
        if tensor.dtype not in INTEGERS or tensor.ndim != 1:
            raise BatchError(
                f"batch ids have {name} of {tensor.dtype} in {tensor.ndim} dims, expected int64 or int32 in one"
            )
    offsets = ids.offsets_or_none()
    if offsets is not None and (
        offsets.numel() != ids.lengths().numel() + 1 or bool((offsets.diff() != ids.lengths()).any())
    ):
        raise BatchError("batch ids have offsets that are not the sums of their lengths")


def _check_streams(batch: Batch, schema: Schema) -> None:
    rows, impressions = batch.rows, batch.sample_ids.shape[0]
    names = [stream.name for stream in schema.streams]
    if sorted(batch.streams) != sorted(names):
        raise BatchError(f"batch has streams {sorted(batch.streams)}, expected {sorted(names)}")
    for number, stream in enumerate(schema.streams):
        found = batch.streams[stream.name]
        offsets = found.offsets
        if offsets.dtype not in INTEGERS or offsets.ndim != 1:
            raise BatchError(
                f"stream {stream.name!r} has offsets of {offsets.dtype} in {offsets.ndim} dims, expected int64 in one"
            )
        steps = offsets.diff()
        sound = offsets.numel() == rows + 1 and int(offsets[0]) == 0 and not bool((steps < 0).any())
        events = int(offsets[-1]) if offsets.numel() else -1
        if not sound or found.actions.numel() != events or found.times.numel() != events:
            raise BatchError(
                f"stream {stream.name!r}: expected {rows + 1} offsets from 0, not decreasing, ending at the number of "
                f"events; came {offsets.numel()} ending at {events}, {found.actions.numel()} actions, "
                f"{found.times.numel()} times"
            )
        first = len(schema.scalars) + len(schema.lists) + sum(len(s.fields) for s in schema.streams[:number])
        for key in range(first, first + len(stream.fields)):
            lengths = batch.ids.lengths()[key * impressions : (key + 1) * impressions]
            lengths = lengths if batch.requests is None else lengths[batch.requests[:-1]]
            if not torch.equal(lengths.to(steps.dtype), steps):
                own = int(torch.nonzero(lengths != steps)[0])
                row = own if batch.requests is None else int(batch.requests[own])
                raise BatchError(
                    f"stream {stream.name!r}: field {stream.fields[key - first].name!r} has "
                    f"{int(lengths[own])} events, the stream has {int(steps[own])}{_place(batch, schema, row)}"
                )


def pad_empty(batch: Batch, schema: Schema, dynamic: Collection[str] = ()) -> Batch:
    """`batch`, or for a batch of zero rows one row of weight 0 (ids 0, one event in each stream, empty bags).

    dynamic: features whose ids are counted: theirs is the largest int64, which never is.

    TorchRec's EmbeddingCollection cannot take zero rows, and every rank has to enter the same collectives. The row adds
    exactly 0 to the loss and to every gradient; row-wise AdaGrad leaves table rows with zero gradient as they are.
    """
    if batch.sample_ids.shape[0]:
        return batch
    one = torch.ones(1, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    events = sum(len(stream.fields) for stream in schema.streams)
    lengths = torch.tensor(
        [1] * len(schema.scalars) + [0] * len(schema.lists) + [1] * events, dtype=batch.ids.lengths().dtype
    )
    names, largest = [key for key, count in zip(batch.ids.keys(), lengths.tolist(), strict=True) if count], 2**63 - 1
    return Batch(
        sample_ids=zero - 1,
        user_ids=zero - 1,
        timestamps=one,
        labels=torch.zeros(1, len(schema.labels)),
        weights=torch.zeros(1, len(schema.labels)),
        dense=torch.zeros(1, len(schema.dense)),
        ids=KeyedJaggedTensor(
            keys=list(batch.ids.keys()),
            values=torch.tensor([largest if name in dynamic else 0 for name in names], dtype=torch.int64),
            lengths=lengths,
        ),
        streams={
            stream.name: EventStream(offsets=torch.tensor([0, 1]), actions=zero, times=zero)
            for stream in schema.streams
        },
        row_index=torch.full((1, 3), -1, dtype=torch.int64),
        global_rows=batch.global_rows,
        step=batch.step,
        requests=None if batch.requests is None else torch.tensor([0, 1]),
    )


def impressions_of(batch: Batch) -> Tensor | None:
    """(R,) impressions of each row, where rows are requests."""
    return None if batch.requests is None else batch.requests.diff()


def event_lengths(batch: Batch) -> dict[str, Tensor]:
    """Stream -> (R,) events per row."""
    return {name: stream.offsets.diff() for name, stream in batch.streams.items()}
