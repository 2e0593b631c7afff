"""Embedding tables: look-up, backward with the fused update, under TorchRec and in the plain reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cases.case import Case
from cases.counting import count_tensors
from cases.process_group import ensure_world_of_one

BATCH, ROWS, DIM = 64, 2000, 32
KEYS = ("user", "item", "tags", "views")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tables of the implementation under test, tables of the reference, and a batch of ids."""

    tables: Any
    reference: Any
    ids: Any
    gradients: dict[str, Any]


def make(*, shape: str, impl: str) -> Inputs:
    """Two scalars, a bag and a sequence; ragged: 0 to 63 ids a row, uniform: 31."""
    import torch
    from gem_embeddings.api import build_tables
    from gem_embeddings.interface import RowWiseAdagrad, TableSpec
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    ensure_world_of_one()
    specs = (
        TableSpec(name="user", rows=ROWS, dim=DIM, features=("user",)),
        TableSpec(name="item", rows=ROWS, dim=DIM, features=("item", "views")),
        TableSpec(name="tag", rows=ROWS, dim=DIM, features=("tags",), pooling="mean"),
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
    build = partial(build_tables, specs, optimizer=RowWiseAdagrad(lr=0.1), seed=3)
    return Inputs(
        tables=build(impl=impl),
        reference=build(impl="reference"),
        ids=ids,
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


def check(inputs: Inputs, result: dict[str, Any]) -> None:
    """The same vectors, and after the update the same weights and moments, as the reference."""
    import torch

    expected = train(inputs.reference, inputs)
    for key in KEYS:
        torch.testing.assert_close(result[key], expected[key], rtol=1e-5, atol=1e-7)
    state, expected_state = inputs.tables.table_state(), inputs.reference.table_state()
    assert state.keys() == expected_state.keys()
    for table, tensors in expected_state.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(state[table][name], tensor, rtol=1e-5, atol=1e-7)


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
