"""What is wrong with a batch is named before anything changes; an empty batch trains nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gem_data.api import build_loader
from gem_data.interface import EventStream, LoaderConfig
from gem_pipelines.batches import BatchError, check_batch, pad_empty
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@pytest.fixture(scope="module")
def batch_and_schema(debug_data):
    loader = build_loader(debug_data, split="train", config=LoaderConfig(global_batch_size=16, prefetch=0))
    batch = next(iter(loader.epoch()))
    yield batch, loader.schema
    loader.close()


def with_cell(batch, name: str, row: int, column: int, value: float):
    changed = getattr(batch, name).clone()
    changed[row, column] = value
    return dataclasses.replace(batch, **{name: changed})


def with_id(batch, feature: str, row: int, value: int):
    """The first id of `feature` in `row` becomes `value`."""
    ids, key = batch.ids, batch.ids.keys().index(feature)
    lengths = ids.lengths().view(len(ids.keys()), -1)
    assert lengths[key, row] > 0
    position = int(lengths[:key].sum() + lengths[key, :row].sum())
    values = ids.values().clone()
    values[position] = value
    return dataclasses.replace(batch, ids=KeyedJaggedTensor(keys=ids.keys(), values=values, lengths=ids.lengths()))


def with_stream(batch, name: str, **changes):
    return dataclasses.replace(
        batch, streams={**batch.streams, name: dataclasses.replace(batch.streams[name], **changes)}
    )


def row_with_events(batch, stream: str) -> int:
    return int(torch.nonzero(batch.streams[stream].offsets.diff())[0])


def test_a_good_batch_passes(batch_and_schema):
    check_batch(*batch_and_schema)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", float("nan"), r"label\.conversion is nan, expected 0 or 1"),
        ("labels", 7.0, r"label\.conversion is 7\.0, expected 0 or 1"),
        ("labels", -1.0, r"label\.conversion is -1\.0, expected 0 or 1"),
        ("weights", -0.5, r"weight\.conversion is -0\.5, expected finite and at least 0"),
        ("weights", float("inf"), r"weight\.conversion is inf, expected finite"),
        ("weights", float("nan"), r"weight\.conversion is nan, expected finite"),
        ("dense", float("nan"), r"dense\.\w+ is nan, expected finite"),
        ("dense", -float("inf"), r"dense\.\w+ is -inf, expected finite"),
    ],
)
def test_bad_numbers_name_task_and_place(batch_and_schema, name, value, message):
    batch, schema = batch_and_schema
    with pytest.raises(BatchError, match=message) as caught:
        check_batch(with_cell(batch, name, 5, 1, value), schema)
    file, group, row = batch.row_index[5].tolist()
    place = f"(sample_id {int(batch.sample_ids[5])}: {schema.files[file].path}, row group {group}, row {row})"
    assert place in str(caught.value)


@pytest.mark.parametrize("wrong", ["rows", "minus one", "far"])
@pytest.mark.parametrize("feature", ["item", "organic.item"])
def test_ids_outside_their_table(batch_and_schema, feature, wrong):
    batch, schema = batch_and_schema
    table = dict(schema.id_features())[feature]
    limit = schema.table_rows()[table]
    row = row_with_events(batch, "organic")
    value = {"rows": limit, "minus one": -1, "far": 2**62}[wrong]
    with pytest.raises(BatchError) as caught:
        check_batch(with_id(batch, feature, row, value), schema)
    message = str(caught.value)
    assert f"id {value} of feature '{feature}' is outside its table '{table}': expected 0 <= id < {limit}" in message
    assert f"sample_id {int(batch.sample_ids[row])}:" in message
    check_batch(with_id(batch, feature, row, limit - 1), schema)


def test_lengths_that_do_not_add_up(batch_and_schema):
    batch, schema = batch_and_schema
    ids = batch.ids
    short = KeyedJaggedTensor(keys=ids.keys(), values=ids.values()[:-1], lengths=ids.lengths())
    with pytest.raises(BatchError, match=f"have {ids.values().numel() - 1} values, but their lengths sum to"):
        check_batch(dataclasses.replace(batch, ids=short), schema)
    fewer = KeyedJaggedTensor(keys=ids.keys()[1:], values=ids.values()[16:], lengths=ids.lengths()[16:])
    with pytest.raises(BatchError, match="have keys"):
        check_batch(dataclasses.replace(batch, ids=fewer), schema)
    negative = ids.lengths().clone()
    negative[0], negative[1] = -1, negative[1] + negative[0] + 1
    with pytest.raises(BatchError, match="none negative"):
        check_batch(
            dataclasses.replace(batch, ids=KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=negative)),
            schema,
        )


def test_streams_must_be_parallel(batch_and_schema):
    batch, schema = batch_and_schema
    stream = batch.streams["organic"]
    with pytest.raises(BatchError, match=r"stream 'organic'.*actions"):
        check_batch(with_stream(batch, "organic", actions=stream.actions[:-1]), schema)
    falling = stream.offsets.clone()
    falling[3] = falling[4] + 1
    with pytest.raises(BatchError, match=r"stream 'organic'.*not decreasing"):
        check_batch(with_stream(batch, "organic", offsets=falling), schema)
    row = row_with_events(batch, "organic")
    moved = stream.offsets.clone()
    moved[row + 1 : -1] -= 1
    with pytest.raises(BatchError, match=r"stream 'organic': field 'item' has \d+ events, the stream has \d+"):
        check_batch(with_stream(batch, "organic", offsets=moved), schema)


def test_shapes(batch_and_schema):
    batch, schema = batch_and_schema
    with pytest.raises(BatchError, match=r"labels has shape \(16, 1\), expected \(16, 2\)"):
        check_batch(dataclasses.replace(batch, labels=batch.labels[:, :1]), schema)


def empty_like(batch):
    """The batch of a rank without rows."""
    none = torch.zeros(0, dtype=torch.int64)
    keys = batch.ids.keys()
    return dataclasses.replace(
        batch,
        **{name: getattr(batch, name)[:0] for name in ("sample_ids", "user_ids", "timestamps", "row_index")},
        **{name: getattr(batch, name)[:0] for name in ("labels", "weights", "dense")},
        ids=KeyedJaggedTensor(keys=keys, values=none, lengths=none),
        global_rows=0,
        streams={
            name: EventStream(offsets=torch.zeros(1, dtype=torch.int64), actions=none, times=none)
            for name in batch.streams
        },
    )


def test_an_empty_batch_passes_and_is_padded_with_a_row_that_weighs_nothing(batch_and_schema):
    batch, schema = batch_and_schema
    empty = empty_like(batch)
    check_batch(empty, schema)
    padded = pad_empty(empty, schema)
    assert padded.weights.tolist() == [[0.0, 0.0]]
    assert padded.ids.keys() == batch.ids.keys()
    assert (padded.ids.lengths().dtype, padded.ids.values().dtype) == (batch.ids.lengths().dtype, torch.int64)
    assert padded.global_rows == 0
    full = {name: tensor.dtype for name, tensor in vars(batch).items() if isinstance(tensor, torch.Tensor)}
    assert {name: getattr(padded, name).dtype for name in full} == full
    assert pad_empty(batch, schema) is batch


def test_the_added_row_counts_no_dynamic_id(batch_and_schema):
    """Ids that earn their rows are counted, but for the largest number, which the added row has."""
    batch, schema = batch_and_schema
    padded = pad_empty(empty_like(batch), schema, {"item", "ads.item"}).ids
    lengths = dict(zip(padded.keys(), padded.lengths().tolist(), strict=True))
    for key, values in zip(padded.keys(), padded.values().split(padded.length_per_key()), strict=True):
        assert values.tolist() == [2**63 - 1 if key in ("item", "ads.item") else 0] * lengths[key], key
    assert lengths["item"] == lengths["ads.item"] == 1


def test_training_on_an_empty_batch_changes_no_table_and_no_gradient(make_job, take_steps, state_of):
    job = make_job(optimizer={"weight_decay": 0.0})
    before = state_of(job)
    (record,) = take_steps(job, 1, change=empty_like)
    after = state_of(job)
    assert record["loss"] == 0.0
    assert record["loss_by_task"] == {"click": None, "conversion": None}
    assert record["grad_norm"] == 0.0
    assert record["samples"] == 0
    changed = [key for key in before if key != "state" and before[key] != after[key]]
    assert changed == []
