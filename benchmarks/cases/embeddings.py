"""Embedding tables: look-up, backward with the fused update, under TorchRec and in the plain reference.

Truth of both is `expected_step`: a dozen lines of torch in float64 over whole tables, which share nothing with either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cases.case import Case
from cases.counting import count_tensors
from cases.process_group import ensure_world_of_one

BATCH, ROWS, DIM = 64, 2000, 32
LEARNING_RATE, EPS = 0.1, 1e-8
KEYS = ("user", "item", "tags", "views")
FEATURES = {"user": ("user",), "item": ("item", "views"), "tag": ("tags",)}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tables of the implementation under test, the weights they must start with, and a batch of ids.

    values, lengths  the ids by feature
    """

    tables: Any
    start: dict[str, Any]
    ids: Any
    values: dict[str, Any]
    lengths: dict[str, Any]
    gradients: dict[str, Any]


def make(*, shape: str, impl: str) -> Inputs:
    """Two scalars, a bag and a sequence; ragged: 0 to 63 ids a row, uniform: 31."""
    import torch
    from gem_embeddings.api import build_tables
    from gem_embeddings.interface import RowWiseAdagrad, TableSpec
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ensure_world_of_one()
    specs = (
        TableSpec(name="user", rows=ROWS, dim=DIM, features=FEATURES["user"]),
        TableSpec(name="item", rows=ROWS, dim=DIM, features=FEATURES["item"]),
        TableSpec(name="tag", rows=ROWS, dim=DIM, features=FEATURES["tag"], pooling="mean"),
    )
    generator = torch.Generator().manual_seed(2)
    many = torch.arange(BATCH)[torch.randperm(BATCH, generator=generator)]
    many = many if shape == "ragged" else torch.full_like(many, 31)
    lengths = {key: many if key in ("tags", "views") else torch.ones_like(many) for key in KEYS}
    values = {key: torch.randint(0, ROWS, (int(n.sum()),), generator=generator) for key, n in lengths.items()}
    ids = KeyedJaggedTensor(
        keys=list(KEYS), values=torch.cat(list(values.values())), lengths=torch.cat(list(lengths.values()))
    )
    rows = {"tags": BATCH, "views": len(values["views"])}
    build = partial(build_tables, specs, optimizer=RowWiseAdagrad(lr=LEARNING_RATE, eps=EPS), seed=3)
    start = build(impl="reference").table_state()
    return Inputs(
        tables=build(impl=impl),
        start={table: tensors["weight"] for table, tensors in start.items()},
        ids=ids,
        values=values,
        lengths=lengths,
        gradients={key: torch.randn(rows.get(key, BATCH), DIM, generator=generator) for key in KEYS},
    )


def run(inputs: Inputs) -> dict[str, Any]:
    """Look up and train once."""
    return train(inputs.tables, inputs)


def train(tables: Any, inputs: Inputs) -> dict[str, Any]:
    import torch

    out = dict(tables(inputs.ids))
    torch.autograd.backward([out[key] for key in KEYS], [inputs.gradients[key] for key in KEYS])
    return {key: value.detach() for key, value in out.items()}


def expected_step(inputs: Inputs, weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
    """The vectors of every feature, and row-wise AdaGrad on weights (ROWS, DIM) and moments (ROWS,), in place."""
    import torch

    out = {}
    for table, features in FEATURES.items():
        total = torch.zeros_like(weights[table])
        for feature in features:
            values, lengths, grad = inputs.values[feature], inputs.lengths[feature], inputs.gradients[feature].double()
            out[feature] = weights[table][values]
            if feature == "tags":  # the mean of a row's vectors, zeros for a row without any
                row = torch.repeat_interleave(torch.arange(BATCH), lengths)
                share = lengths.clamp(min=1).double()[:, None]
                out[feature] = torch.zeros(BATCH, DIM).double().index_add_(0, row, out[feature]) / share
                grad = (grad / share)[row]
            total.index_add_(0, values, grad)
        moments[table] += (total**2).mean(1)
        weights[table] -= LEARNING_RATE * total / (moments[table].sqrt() + EPS)[:, None]
    return out


def check(inputs: Inputs, result: dict[str, Any]) -> None:
    """The vectors, weights and moments of two steps: in the second, moments add to those of the first."""
    import torch

    weights = {table: weight.double() for table, weight in inputs.start.items()}
    moments = {table: torch.zeros(ROWS).double() for table in weights}
    for step in (1, 2):
        expected = expected_step(inputs, weights, moments)
        got = result if step == 1 else train(inputs.tables, inputs)
        assert got.keys() == expected.keys()
        for key in KEYS:
            torch.testing.assert_close(got[key].double(), expected[key], rtol=1e-5, atol=1e-7)
    state = inputs.tables.table_state()
    assert state.keys() == weights.keys()
    for table, tensors in state.items():
        torch.testing.assert_close(tensors["weight"].double(), weights[table], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(tensors["momentum"].double(), moments[table], rtol=1e-5, atol=1e-7)


CASES = tuple(
    Case(
        name=f"embeddings.train_{impl}_{shape}",
        make=partial(make, shape=shape, impl=impl),
        run=run,
        check=check,
        count=count_tensors,
    )
    for impl, shape in (("torchrec", "ragged"), ("torchrec", "uniform"), ("reference", "ragged"))
)
