"""What the suites compare with and how: quirks, oracles, states that are held (public through testing.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import ManagedIds, Policy, RowWiseAdagrad, Tables, TableSpec
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing_inputs import OPTIMIZER, SEED, SPECS

Factory = Callable[[Sequence[TableSpec], RowWiseAdagrad, int], Tables]
State = Mapping[str, Mapping[str, Tensor]]
DTYPES = (torch.float64, torch.float32)


class ConfiguredFactory(Protocol):
    """Builds tables with policies by feature, or with tables whose ids earn their rows; see `api.build_tables`."""

    def __call__(
        self,
        specs: Sequence[TableSpec],
        optimizer: RowWiseAdagrad,
        seed: int,
        *,
        policies: Mapping[str, Policy] | None = None,
        managed: Mapping[str, ManagedIds] | None = None,
    ) -> Tables:
        """The tables."""
        ...


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation is allowed to differ in, as data.

    device         where ids go and vectors come from
    error_factor   allowed multiple of the float32 reference's error against float64
    column_parts   table -> parts that its columns are cut in, each with a moment of its own
    copied         tables that every rank holds whole and keeps equal without copies ("data_parallel"): what
                   `copied_parts` shows of them is compared, and that it shows no other table
    """

    device: str = "cpu"
    error_factor: float = 3.0
    column_parts: Mapping[str, int] = field(default_factory=dict)
    copied: tuple[str, ...] = ()


def make_oracle(
    quirks: Quirks,
    dtype: torch.dtype,
    optimizer: RowWiseAdagrad = OPTIMIZER,
    *,
    specs: Sequence[TableSpec] = SPECS,
    managed: Mapping[str, ManagedIds] | None = None,
    policies: Mapping[str, Policy] | None = None,
) -> ReferenceTables:
    """The reference, alone."""
    return ReferenceTables(
        specs,
        optimizer=optimizer,
        seed=SEED,
        dtype=dtype,
        alone=True,
        column_parts=quirks.column_parts,
        managed=managed,
        policies=policies,
    )


def make_oracles(quirks: Quirks, **options: Any) -> list[ReferenceTables]:
    """In float64 and in float32."""
    return [make_oracle(quirks, dtype, **options) for dtype in DTYPES]


def held(state: State) -> dict[str, dict[str, Tensor]]:
    """A state in memory of its own: one that the tables still write to would be compared with itself."""
    return {name: {key: part.clone() for key, part in parts.items()} for name, parts in state.items()}


def overwrite(state: State) -> None:
    """Write into every tensor of a state, as its owner may."""
    for parts in state.values():
        for part in parts.values():
            part.fill_(7)


def look_up(tables: Tables, ids: KeyedJaggedTensor, quirks: Quirks) -> dict[str, Tensor]:
    """`tables(ids)` on the device, which leaves the batch as it is."""
    moved = ids.to(torch.device(quirks.device))
    given = [None if part is None else part.clone() for part in _parts_of(moved)]
    out = tables(moved)
    for part, before in zip(_parts_of(moved), given, strict=True):
        assert part is None or before is None or torch.equal(part, before), (
            f"the lookup changed the batch: {part}, before {before}"
        )
    return out


def _parts_of(ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return ids.values(), ids.lengths(), ids.weights_or_none()


def assert_close_to_oracle(tables: Tables, oracles: Sequence[ReferenceTables], quirks: Quirks) -> None:
    """Weights and moments within the allowed error of float64."""
    state, exact, plain = tables.table_state(), oracles[0].table_state(), oracles[1].table_state()
    for name in exact:
        for key in ("weight", "momentum"):
            error = (state[name][key].double() - exact[name][key]).abs().max()
            rounding = (plain[name][key].double() - exact[name][key]).abs().max()
            floor = 2 * torch.finfo(torch.float32).eps * exact[name][key].abs().max()
            allowed = quirks.error_factor * rounding + floor
            assert error <= allowed, f"{name} {key}: error {error:.3g} against float64, allowed {allowed:.3g}"


def assert_same_state(first: State, second: State, what: str) -> None:
    """Weights and moments, bit for bit."""
    for name in first:
        for key in ("weight", "momentum"):
            assert_equal(second[name][key], first[name][key], f"{what}: {name} {key}")


def assert_same_ids(first: State, second: State, what: str) -> None:
    """Id maps, or any states of the same tables and entries, bit for bit."""
    assert {n: sorted(parts) for n, parts in first.items()} == {n: sorted(parts) for n, parts in second.items()}, what
    for name, parts in first.items():
        for key, part in parts.items():
            assert_equal(part, second[name][key], f"{what}: {name} {key}")


def assert_equal(came: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit."""
    assert torch.equal(came.detach(), expected), f"{what}: {came} differs from {expected}"


def assert_rounded(came: Tensor, expected: Tensor, what: str) -> None:
    """To a few roundings of float32."""
    torch.testing.assert_close(came, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


def error_of(call: Callable[[], Any]) -> str:
    """What the ValueError of a call says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError was raised")
