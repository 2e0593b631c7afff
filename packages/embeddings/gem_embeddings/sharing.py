"""A feature that looks up several tables, made of features that look up one each.

TorchRec can share a feature between tables of one collection; ours lie in several collections, and policies belong to a
feature *and* its table. So a shared feature is copied, once per table, under the name of its output, before anything
else happens. Cost: its ids travel once per table.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import Policy, TableSpec


class SharedFeatures:
    """specs: the same tables, in which every feature is looked up by one table.

    Example: tables a and b with features ("x", "y") and ("x",): a looks up "x@a" and "y", b looks up "x@b".
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        counts = Counter(feature for spec in specs for feature in spec.features)
        self.shared = {feature for feature, count in counts.items() if count > 1}
        self._sources: list[tuple[str, str]] = []  # (own name, feature of the batch)
        found = []
        for spec in specs:
            names = tuple(self._name(feature, spec.name) for feature in spec.features)
            self._sources += zip(names, spec.features, strict=True)
            found.append(dataclasses.replace(spec, features=names))
        self.specs = tuple(found)

    def _name(self, feature: str, table: str) -> str:
        return f"{feature}@{table}" if feature in self.shared else feature

    def policies(self, policies: Mapping[str, Policy] | None) -> dict[str, Policy]:
        """Policies of features as policies of own names."""
        given = policies or {}
        return {name: given[feature] for name, feature in self._sources if feature in given}

    def spread(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch under own names; itself where no feature is shared. ValueError names features that are missing."""
        if not self.shared:
            return ids
        keys = ids.keys()
        missing = sorted({feature for _, feature in self._sources if feature not in keys})
        if missing:
            raise ValueError(f"the batch lacks features {missing}; it has {keys}")
        chosen = ids.permute([keys.index(feature) for _, feature in self._sources])
        return KeyedJaggedTensor(
            keys=[name for name, _ in self._sources],
            values=chosen.values(),
            lengths=chosen.lengths(),
            weights=chosen.weights_or_none(),
        )
