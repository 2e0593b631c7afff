"""The tile lists of a layout, made once and shared by its layers, forward and backward.

Every layer of a model calls attention with the same layout, and every kernel wants the list of its tiles (see
triton_tiles): made anew, that was a third of the launches of attention and 4 ms of host time in a step of 14 calls. The
operators take no objects, so a layout's lists travel as a number. They live as long as the layout or a backward that
has still to come. Number 0 keeps nothing: under torch.compile, where a number would be a constant of the graph, and
while a CUDA graph is captured, which is to list the tiles anew at each replay.
"""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from gem_attention.interface import Layout

NOT_KEPT = 0


class TileLists(dict[tuple[object, ...], Tensor]):
    """Lists by what they were made for; `number` names them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


_numbers = itertools.count(1)
_by_layout: WeakKeyDictionary[Layout, TileLists] = WeakKeyDictionary()
_by_number: WeakValueDictionary[int, TileLists] = WeakValueDictionary()


def number_of(layout: Layout) -> int:
    """The number of the layout's lists."""
    captured = layout.k_offsets.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or torch.compiler.is_compiling():
        return NOT_KEPT
    found = _by_layout.get(layout)
    if found is None:
        found = _by_layout[layout] = TileLists(next(_numbers))
        _by_number[found.number] = found
    return found.number


def lists_of(number: int) -> TileLists | None:
    """The lists with that number; None where none are kept, or no longer."""
    return _by_number.get(number)
