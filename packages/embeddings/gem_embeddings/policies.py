"""What happens to ids outside their table, feature by feature, before any lookup.

    error  a ValueError that names feature, row and id (validation.check_ids)
    drop   the id is taken out of the batch. A bag is then pooled without it; where the caller expects one vector per
           id, a vector of zeros stands in its place, and no gradient goes anywhere
    hash   the id becomes 1 + hash(id, salt) % (rows - 1): another row, never row 0, which data often keep for
           "unknown". The salt comes from the table's name, so features that share a table agree, and other tables do
           not collide in the same pairs

FBGEMM itself would warn and train row 0. Ids inside the table are never changed. Counts stay on the device and are
read when asked for.

The hash is the finalizer of splitmix64 (public domain, S. Vigna) of id xor salt; arithmetic wraps modulo 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import Policy, TableSpec
from gem_embeddings.validation import check_ids

POLICIES = ("error", "drop", "hash")


def check_policies(specs: Sequence[TableSpec], policies: Mapping[str, str]) -> None:
    """Raise ValueError for an unknown feature or policy, and for a table too small to hash into."""
    owner = {feature: spec for spec in specs for feature in spec.features}
    for feature, policy in policies.items():
        if feature not in owner:
            raise ValueError(f"policies name feature {feature!r}; the features are {sorted(owner)}")
        if policy not in POLICIES:
            raise ValueError(f"policy of feature {feature!r} must be one of {POLICIES}, got {policy!r}")
        if policy == "hash" and owner[feature].rows < 2:
            raise ValueError(
                f"feature {feature!r}: policy 'hash' needs a table of at least 2 rows (row 0 is never hashed into), "
                f"table {owner[feature].name!r} has {owner[feature].rows}"
            )


def salt_of(table: str) -> int:
    """A number of 63 bits from the table's name."""
    return int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "little") >> 1


def splitmix64(ids: Tensor, salt: int) -> Tensor:
    """(N,) int64 -> (N,) int64, spread over all 64 bits. Example: splitmix64([0], 0) is [0]; the finalizer keeps 0."""
    x = ids.long() ^ salt
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def hash_into(ids: Tensor, *, rows: int, salt: int) -> Tensor:
    """Rows 1 to rows - 1."""
    return 1 + (splitmix64(ids, salt) & 0x7FFF_FFFF_FFFF_FFFF) % (rows - 1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class IdPolicies:
    """Applies the policies to batches and counts."""

    def __init__(self, specs: Sequence[TableSpec], policies: Mapping[str, Policy] | None) -> None:
        self._specs = tuple(specs)
        self._policies = {feature: policy for feature, policy in (policies or {}).items() if policy != "error"}
        check_policies(specs, self._policies)
        self._owner = {feature: spec for spec in specs for feature in spec.features}
        self._ids: dict[str, int] = dict.fromkeys(self._policies, 0)
        self._outside: dict[str, Tensor | int] = dict.fromkeys(self._policies, 0)

    def counts(self) -> dict[str, dict[str, int]]:
        """Feature -> {"ids", "outside"}."""
        if any(isinstance(count, Tensor) and count.is_cuda for count in self._outside.values()):
            torch.cuda.synchronize()  # they are counted on the stream that ids are prepared on
        return {f: {"ids": self._ids[f], "outside": int(self._outside[f])} for f in self._policies}

    def apply(self, ids: KeyedJaggedTensor, *, count: bool = True) -> tuple[KeyedJaggedTensor, dict[str, Tensor]]:
        """The batch with every id inside its table, and feature -> (N,) bool, the ids kept, where any can be missing.

        Raises ValueError as `check_ids` does, for features whose policy is "error"; nothing is counted then, nor
        without `count` (a batch that was counted before).
        """
        check_ids(self._specs, ids, allow=self._policies)
        if not self._policies:
            return ids, {}
        keys = ids.keys()
        values = list(ids.values().split(ids.length_per_key()))
        weights = ids.weights_or_none()
        weights_of = None if weights is None else list(weights.split(ids.length_per_key()))
        lengths = list(ids.lengths().view(len(keys), -1).unbind()) if ids.stride() else []
        kept: dict[str, Tensor] = {}
        for number, key in enumerate(keys):
            policy = self._policies.get(key)
            if policy is None:
                continue
            spec, own_N = self._owner[key], values[number]
            outside_N = (own_N < 0) | (own_N >= spec.rows)
            if count:
                self._ids[key] += own_N.numel()
                self._outside[key] = self._outside[key] + outside_N.sum()
            if policy == "hash":
                hashed_N = hash_into(own_N, rows=spec.rows, salt=salt_of(spec.name)).to(own_N.dtype)
                values[number] = torch.where(outside_N, hashed_N, own_N)
            else:
                kept[key] = ~outside_N
                values[number] = own_N[kept[key]]
                if weights_of is not None:
                    weights_of[number] = weights_of[number][kept[key]]
                if lengths:
                    lengths[number] = _kept_per_row(kept[key], lengths[number])
        flat = torch.cat(lengths) if lengths else ids.lengths()
        joined = None if weights_of is None else torch.cat(weights_of)
        return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=flat, weights=joined), kept

    def fill_in(self, vectors: dict[str, Tensor], kept: dict[str, Tensor]) -> dict[str, Tensor]:
        """Zeros where single vectors of dropped ids would be."""
        for feature, kept_N in kept.items():
            if self._owner[feature].pooling == "none":
                found_KD = vectors[feature]
                zeros_ND = found_KD.new_zeros(kept_N.numel(), found_KD.shape[1])
                vectors[feature] = zeros_ND.index_copy(0, kept_N.nonzero().view(-1), found_KD)
        return vectors


def _kept_per_row(kept_N: Tensor, lengths_B: Tensor) -> Tensor:
    row_N = torch.repeat_interleave(lengths_B, output_size=kept_N.numel())
    return torch.zeros_like(lengths_B).index_add(0, row_N, kept_N.to(lengths_B.dtype))
