"""Not keeping what the backward can rebuild, and counting what is kept.

`Rebuilt` works on any operation that saves a named tensor (or a view of it), also on one that knows nothing of it, such
as an attention call passed in as a function: hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) put a
recipe in the tensor's place. Unlike torch.utils.checkpoint nothing but that tensor is computed again. Only the
innermost hooks see a tensor, so regions follow one another and do not nest.

What the recipe holds counts as kept: it must be named (`needs`), so that the count stays exact.
Cost: a rebuilt tensor lives from its first use in the backward to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_counters: ContextVar[tuple[SavedBytes, ...]] = ContextVar("counters of saved bytes", default=())


class SavedBytes:
    """Counts the bytes of distinct storages that autograd keeps for operations inside the `with`.

    Example: y = x.sigmoid() of 10 float32 values keeps y:
        with SavedBytes() as saved:
            y = x.sigmoid()
        saved.total()            # 40
    exclude: tensors that exist anyway (weights, tables shared by all layers). A storage counts in full, even when only
    a view of it is kept; that is what stays allocated.
    """

    def __init__(self, *, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
        self._found: dict[int, int] = {}

    def note(self, tensor: Tensor) -> None:
        """Count a kept tensor."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._excluded and storage.nbytes():
            self._found[storage.data_ptr()] = storage.nbytes()

    def total(self) -> int:
        """Bytes so far."""
        return sum(self._found.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        for counter in _counters.get():
            counter.note(tensor)
        return tensor.detach()

    def __enter__(self) -> SavedBytes:
        self._token = _counters.set((*_counters.get(), self))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        _counters.reset(self._token)


class Rebuilt:
    """Inside the `with`, the given tensors are not kept; the backward calls `recipe` for them, once, without gradients.

    recipe() returns as many tensors as were given, with the same values, shapes and strides; it holds `needs`.
    active=False: a `with` that does nothing.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        recipe: Callable[[], Sequence[Tensor]],
        *,
        needs: Sequence[Tensor] = (),
        active: bool = True,
    ) -> None:
        self._recipe = recipe
        self._needs = tuple(needs)
        self._active = active and torch.is_grad_enabled()
        self._places: dict[int, int] = {}
        self._tensors = tuple(tensors)
        self._made: Sequence[Tensor] = ()
        self._waiting = 0
        self._left = 0

    def get(self) -> Sequence[Tensor]:
        """The rebuilt tensors (those given, while they are at hand)."""
        if self._tensors:
            return self._tensors
        if not self._made:
            with torch.no_grad():
                self._made = tuple(self._recipe())
            self._left = self._waiting
        return self._made

    def _pack(self, tensor: Tensor) -> Any:
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is None or not tensor.numel():
            for counter in _counters.get():
                counter.note(tensor)
            return tensor.detach()
        self._waiting += 1
        return place, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, size, stride, offset = packed
        tensor = self.get()[place].as_strided(size, stride, offset)
        self._left -= 1
        if self._left <= 0:
            self._made = ()
        return tensor

    def __enter__(self) -> Rebuilt:
        if self._active:
            for counter in _counters.get():
                for tensor in self._needs:
                    counter.note(tensor)
            self._places = {tensor.untyped_storage().data_ptr(): i for i, tensor in enumerate(self._tensors)}
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._active:
            self._hooks.__exit__(*exception)
            # from here on the graph's recipe must not keep what it stands for
            self._tensors, self._needs, self._places = (), (), {}
