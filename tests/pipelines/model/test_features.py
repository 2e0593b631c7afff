"""From a batch to the model's input, with real tables: pooling of shared tables, order, and one step of learning."""

from __future__ import annotations

import torch
from gem_data.interface import Batch, EventStream
from gem_embeddings.api import build_tables
from gem_embeddings.interface import RowWiseAdagrad
from gem_pipelines.features import mean_of_rows, to_model_input
from gem_pipelines.model import build_model, table_specs
from gem_pipelines.model.testing import NOW, make_config, make_schema
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def make_batch() -> Batch:
    """Two rows: tags [[3, 5], []], clicks [2, 0] events, views [0, 1]."""
    values = [[1, 2], [3, 4], [3, 5], [7, 8], [1, 2], [6]]
    lengths = [[1, 1], [1, 1], [2, 0], [2, 0], [2, 0], [0, 1]]
    schema = make_schema()

    def stream(offsets, times):
        return EventStream(
            offsets=torch.tensor(offsets), actions=torch.zeros(len(times), dtype=torch.int64), times=torch.tensor(times)
        )

    return Batch(
        sample_ids=torch.arange(2),
        user_ids=torch.arange(2),
        timestamps=torch.tensor([NOW, NOW + 5]),
        labels=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        weights=torch.ones(2, 2),
        dense=torch.tensor([[0.5, -1.0], [2.0, 0.0]]),
        ids=KeyedJaggedTensor(
            keys=[key for key, _ in schema.id_features()],
            values=torch.tensor([value for own in values for value in own]),
            lengths=torch.tensor([length for own in lengths for length in own]),
        ),
        streams={"clicks": stream([0, 2, 2], [NOW - 9, NOW - 3]), "views": stream([0, 0, 1], [NOW])},
        row_index=torch.zeros(2, 3, dtype=torch.int64),
        global_rows=2,
        step=0,
    )


def make_tables(config):
    specs = table_specs(make_schema(), config)
    return build_tables(specs, optimizer=RowWiseAdagrad(lr=0.1), seed=0, impl="reference")


def test_lists_over_shared_tables_are_averaged():
    tables, batch = make_tables(make_config()), make_batch()
    inputs = to_model_input(batch, tables(batch.ids), schema=make_schema())
    state = {name: entry["weight"] for name, entry in tables.table_state().items()}
    tags = inputs.embeddings["tags"].detach()
    torch.testing.assert_close(tags[0], (state["tag"][3] + state["tag"][5]) / 2)
    assert not tags[1].any()
    assert torch.equal(inputs.embeddings["item"].detach(), state["item"][[1, 2]])
    assert torch.equal(inputs.embeddings["clicks.item"].detach(), state["item"][[7, 8]])
    assert torch.equal(inputs.embeddings["views.tag"].detach(), state["tag"][[6]])


def test_streams_keep_order_and_know_their_longest_row():
    tables, batch = make_tables(make_config()), make_batch()
    inputs = to_model_input(batch, tables(batch.ids), schema=make_schema())
    assert inputs.streams["clicks"].max_len == 2
    assert inputs.streams["views"].max_len == 1
    assert inputs.streams["clicks"].times is batch.streams["clicks"].times
    assert inputs.timestamps is batch.timestamps


def test_mean_of_rows_is_the_documented_example():
    vectors = torch.tensor([[1.0], [3.0], [7.0]])
    assert mean_of_rows(vectors, torch.tensor([2, 0, 1])).tolist() == [[2.0], [0.0], [7.0]]


def test_dense_and_tables_learn_together():
    config, batch = make_config(), make_batch()
    tables, model = make_tables(config), build_model(make_schema(), config, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(30):
        logits = model(to_model_input(batch, tables(batch.ids), schema=make_schema()))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 < losses[0]
    moved = {name for name, entry in tables.table_state().items() if entry["momentum"].any()}
    assert moved == {"item", "user", "tag"}
