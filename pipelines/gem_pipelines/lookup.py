"""One lookup of the tables a step, and its update as a thing that is done last.

The fused optimizer of the tables runs inside backward, so a check of the loss alone comes too late: one element that
is not a number would already stand in a row. Therefore the vectors that tables give are cut from the graph. The model
is differentiated down to them first, which changes nothing; their gradients are looked at; and only then, when all
ranks have agreed that the step is good, they are handed on to the tables' backward, which updates.

With accumulation the micro-batches of a step are looked up together and their gradients are handed on together: a step
updates the tables once, with the sum of gradients, as one larger batch would.

Cost: one pass over the gradients of the vectors, which exist anyway, for their largest magnitude; with accumulation the
vectors of all micro-batches are in memory at once, and are copied once. Lost: the exchange of table gradients cannot
start before the last dense gradient is exchanged.

Legend: B rows, N ids of a feature, D dim, K features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from gem_data.interface import Batch
from gem_embeddings.interface import Prepared, Tables, TableSpec
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

LARGEST_GRADIENT = 1e15
"""A larger one would not be infinite itself, but its square, summed over repeated ids, would be, and the row's second
moment with it: a row that never learns again."""


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Vectors of one step. vectors: as the tables gave them; leaves: for each micro-batch, feature -> what its model
    sees, (N, D) or (B, D), which collects the gradient.
    """

    vectors: dict[str, Tensor]
    leaves: tuple[dict[str, Tensor], ...]

    def gradients(self) -> dict[str, Tensor]:
        """Feature -> gradient of `vectors`; zeros where nothing came."""
        found = {}
        for feature in self.vectors:
            parts = [leaves[feature] for leaves in self.leaves]
            grads = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
            found[feature] = grads[0] if len(grads) == 1 else torch.cat(grads)
        return found

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Hand the gradients to the tables, which update in place. Every rank calls it, or none."""
        pairs = [(vector, gradients[feature]) for feature, vector in self.vectors.items() if vector.requires_grad]
        torch.autograd.backward([vector for vector, _ in pairs], [grad for _, grad in pairs])


def look_up(
    tables: Tables, specs: Sequence[TableSpec], batches: Sequence[Batch], prepared: Prepared | None = None
) -> Lookup:
    """Look up the ids of all micro-batches in one call. Changes nothing. prepared: of their joined ids."""
    if prepared is None:
        prepared = tables.prepare(join_ids([batch.ids for batch in batches]))
    vectors = tables.look_up(prepared)
    if len(batches) == 1:
        parts: tuple[dict[str, Tensor], ...] = (vectors,)
    else:
        pooled = {feature for spec in specs if spec.pooling != "none" for feature in spec.features}
        parts = _split(vectors, pooled, batches)
    return Lookup(
        vectors=vectors,
        leaves=tuple({name: part.detach().requires_grad_() for name, part in cut.items()} for cut in parts),
    )


def join_ids(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The rows of all parts, one after the other, as one jagged tensor of the same keys.

    Example: ids [[1], [2, 3]] and [[4]] of one feature: values [1, 2, 3, 4], lengths [1, 2, 1].
    """
    if len(parts) == 1:
        return parts[0]
    keys = parts[0].keys()
    values = [part.values().split(part.length_per_key()) for part in parts]
    lengths_KB = torch.cat([part.lengths().view(len(keys), -1) for part in parts], dim=1)
    joined = torch.cat([own[key] for key in range(len(keys)) for own in values])
    return KeyedJaggedTensor(keys=keys, values=joined, lengths=lengths_KB.flatten())


def _split(vectors: dict[str, Tensor], pooled: set[str], batches: Sequence[Batch]) -> tuple[dict[str, Tensor], ...]:
    """Vectors of joined ids, micro-batch by micro-batch."""
    keys = batches[0].ids.keys()
    counts = {key: [batch.ids.length_per_key()[number] for batch in batches] for number, key in enumerate(keys)}
    rows = [batch.sample_ids.shape[0] for batch in batches]
    cut = {name: vector.split(rows if name in pooled else counts[name]) for name, vector in vectors.items()}
    return tuple({name: parts[number] for name, parts in cut.items()} for number in range(len(batches)))


def largest_magnitude(gradients: Mapping[str, Tensor]) -> Tensor:
    """The largest absolute value of all elements, NaN if one is NaN; a scalar on the device."""
    present = [grad for grad in gradients.values() if grad.numel()]
    if not present:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(present, norm_type=float("inf"))


def bad_rows(gradients: Mapping[str, Tensor], batches: Sequence[Batch], pooled: set[str]) -> list[tuple[str, int]]:
    """(feature, row of the joined batches) of every row with a gradient that must not reach its table, in order."""
    ids = join_ids([batch.ids for batch in batches])
    keys, rows = ids.keys(), sum(batch.sample_ids.shape[0] for batch in batches)
    lengths_KB = ids.lengths().view(len(keys), rows)
    found = []
    for feature, grad in gradients.items():
        bad = (~(grad.abs() <= LARGEST_GRADIENT)).any(1).nonzero().view(-1).to(lengths_KB.device)
        if feature not in pooled:
            ends_B = lengths_KB[keys.index(feature)].cumsum(0)
            bad = torch.searchsorted(ends_B, bad, right=True).unique()
        found += [(feature, int(row)) for row in bad]
    return found
