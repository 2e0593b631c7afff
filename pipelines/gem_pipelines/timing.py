"""Where the time of a step goes, by part of the model, forward and backward.

On a profiled step the clock is read at every border between parts, and the time between two readings goes to the part
entered at the first. Borders in forward are module hooks. In backward, autograd runs the operations in reverse order
of their creation, so a part's backward begins when the gradient of its output is complete: a hook on that tensor
reads the clock. Nothing is inserted into the graph; a profiled step therefore computes the same bits as any other.
Operations between parts count to the part whose output follows them.

Hooks exist only during profiled steps. On CUDA the device is synchronised at every border of a profiled step, which is
why not every step is profiled; a clock with `synchronize` False waits for nothing, and its figures mean nothing there.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("read", "tables", "sequence", "interaction", "cross", "heads", "optimizer", "other")


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Inside, Python's garbage collector leaves out what exists already: modules and models are a million objects, and
    one look at all of them stops the launching of a step, on one rank while the others wait, for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class PartClock:
    """Adds up seconds by part. `clock` is for tests; `synchronize` False: do not wait for a CUDA device."""

    def __init__(
        self, *, device: torch.device, clock: Callable[[], float] = time.perf_counter, synchronize: bool = True
    ) -> None:
        self._waits = synchronize and device.type == "cuda"
        self._device = device
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._current = "other"
        self._since = clock()

    def switch(self, part: str) -> str:
        """From now on time belongs to `part`; returns the part before."""
        if self._waits:
            torch.cuda.synchronize(self._device)
        now = self._clock()
        self._seconds[self._current] += now - self._since
        previous, self._current, self._since = self._current, part, now
        return previous

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time inside belongs to `name`."""
        previous = self.switch(name)
        try:
            yield
        finally:
            self.switch(previous)

    def seconds(self) -> dict[str, float]:
        """Seconds by part until now."""
        self.switch(self._current)
        return dict(self._seconds)

    @contextmanager
    def watching(self, parts: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
        """Read the clock at the borders of `parts` (part -> modules) while inside."""
        unknown = set(parts) - set(PARTS)
        assert not unknown, f"parts {sorted(unknown)} have no place in {PARTS}"
        handles, seen, stack = [], set[int](), list[str]()

        def enter(part: str) -> Callable[..., None]:
            return lambda module, args, kwargs: stack.append(self.switch(part))

        def leave(part: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                self.switch(stack.pop())
                passed_through = {id(tensor) for tensor in tensors_in((args, kwargs))}
                self.mark_backward(part, output, seen | passed_through)
                seen.update(id(tensor) for tensor in tensors_in(output))

            return hook

        for part, modules in parts.items():
            for module in modules:
                handles.append(module.register_forward_pre_hook(enter(part), with_kwargs=True))
                handles.append(module.register_forward_hook(leave(part), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mark_backward(self, part: str, outputs: Any, skip: set[int] | frozenset[int] = frozenset()) -> None:
        """When the gradient of a tensor in `outputs` is complete, time belongs to `part`."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and id(tensor) not in skip:
                tensor.register_hook(lambda grad: self._enter_backward(part))

    def _enter_backward(self, part: str) -> None:
        self.switch(part)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name))
