"""Ids that travel ahead of their lookup: TorchRec's input exchange, started on one batch while another is computed.

A sharded module's forward is `input_dist` (which ids each rank gets: counts, then ids), lookup, and the exchange of
vectors. The first reads no weights. `Started` holds it between its start and the lookup. On CUDA it runs on a stream of
its own, since counts are read by the host: on the stream of the dense part the host would wait for all of that.

Cost: the exchanged ids of one more batch are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.managed import Mapped
from gem_embeddings.validation import mark_used


class Started:
    """See `interface.Prepared`. rows: of the batch; ids: after policies; kept: see policies.py."""

    def __init__(
        self, ids: KeyedJaggedTensor, kept: dict[str, Tensor], rows: int, stream: Any, modules: Sequence[nn.Module]
    ) -> None:
        self.ids, self.kept, self.rows, self.used = ids, kept, rows, False
        self.given: KeyedJaggedTensor | None = None  # and what it was mapped to, where ids are managed
        self.mapped: Mapped | None = None
        self._stream, self._modules = stream, tuple(modules)
        self._contexts: list[Any] = []
        self._inputs: list[Any] = []

    def send(self, parts: Sequence[KeyedJaggedTensor]) -> None:
        """Begin the exchanges, one part a module: all counts first, then all ids."""
        self._contexts = [module.create_context() for module in self._modules]
        counts = [
            module.input_dist(context, part)
            for module, context, part in zip(self._modules, self._contexts, parts, strict=True)
        ]
        self._inputs = [count.wait() for count in counts]

    def wait(self) -> None:
        """Until the ids are here."""
        mark_used(self)
        with on_stream(self._stream):
            self._inputs = [pending.wait() for pending in self._inputs]

    def look_up(self) -> list[Any]:
        """What each module gives, lazily: the exchange of vectors is under way when this returns. After `wait`."""
        inputs = self._inputs
        if self._stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            for held in (*inputs, *self._contexts, self.ids, *self.kept.values()):
                held.record_stream(current)
        return [
            module.compute_and_output_dist(context, given)
            for module, context, given in zip(self._modules, self._contexts, inputs, strict=True)
        ]


def on_stream(stream: Any) -> Any:
    """A context in which work goes to `stream`; None: where it goes anyway."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
