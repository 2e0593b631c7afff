"""Exact counts of what one call does: the same numbers on every run and every machine with the same versions.

    ops                   operators that reach the dispatcher, forward and backward, views left out
    bytes_moved           bytes those operators read and write, each tensor argument and result once per operator
    matmul_flops          floating point operations of matrix products and convolutions, as run (padding included)
    peak_bytes            most bytes alive at once in tensors made during the call
    python_calls          Python and C functions called from Python: what collating, planning and glue cost
    collectives.<axis>    collective operations, by mesh axis ("world" for the default group)
    collective_bytes.<axis>   bytes they read and write on this rank

An operator's internal scratch memory is not seen, nor is what a kernel does between reading and writing. Two passes are
made, since the profile hook of the second would count the bookkeeping of the first. The call must be deterministic and
run in the calling thread; it is counted with the garbage collector off, whose time to run depends on all that the
process has allocated before. What depends on the machine (folders of sys.path, depth of a path) has no place in a
counted call: benchmarks/exact.py finds it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from cases.memory import no_collection

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
NOT_A_TRANSFER = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def count_tensors(inputs: Any, run: Callable[[Any], Any]) -> dict[str, int]:
    """Counts of one call of `run`: the default `Case.count`."""
    with no_collection():
        for _ in range(2):  # the first pass under a dispatch mode keeps some tensors longer; from the second all agree
            with TensorCounter() as counter:
                result = run(inputs)
            del result
    return {**counter.totals(), "python_calls": python_calls(lambda: run(inputs))}


def python_calls(function: Callable[[], Any]) -> int:
    """Python and C functions that `function` calls in this thread, itself included."""
    calls = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    with no_collection():
        sys.setprofile(on_event)
        try:
            function()
        finally:
            sys.setprofile(before)
    return calls - 1  # the call of sys.setprofile that ends it


class TensorCounter(TorchDispatchMode):
    """Counts operators, bytes, FLOPs, live tensor bytes and collectives while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter(ops=0, bytes_moved=0, matmul_flops=0)
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def totals(self) -> dict[str, int]:
        """The counts so far."""
        return {**self.counts, "peak_bytes": self.peak_bytes}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = list(tensors((args, kwargs))), list(tensors(result))
        if func.namespace in COLLECTIVE_NAMESPACES:
            self._count_collective(func, args, kwargs, [*inputs, *outputs])
        elif not is_view(func):
            self.counts["ops"] += 1
            self.counts["bytes_moved"] += sum(map(tensor_bytes, inputs)) + sum(map(tensor_bytes, outputs))
            if func._overloadpacket in flop_registry:
                self.counts["matmul_flops"] += flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        self._follow_memory(inputs, outputs)
        return result

    def _count_collective(self, func: Any, args: Any, kwargs: Any, touched: list[Tensor]) -> None:
        if func._opname in NOT_A_TRANSFER:
            return
        axis = mesh_axis((*args, *kwargs.values()))
        self.counts[f"collectives.{axis}"] += 1
        distinct = {tensor.untyped_storage()._cdata: tensor_bytes(tensor) for tensor in touched}
        self.counts[f"collective_bytes.{axis}"] += sum(distinct.values())

    def _follow_memory(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Add new storages, follow resized ones; `_forget` takes a storage off when it dies."""
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in (*inputs, *outputs):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._sizes:
                self.live_bytes += size - self._sizes[key]
                self._sizes[key] = size
            elif key not in given:
                self._sizes[key] = size
                self.live_bytes += size
                weakref.finalize(storage, self._forget, key).atexit = False
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def tensors(tree: Any) -> Iterable[Tensor]:
    """The tensors of nested tuples, lists and dictionaries."""
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that a tensor shows."""
    return tensor.numel() * tensor.element_size()


def is_view(func: Any) -> bool:
    """Whether an operator only gives another look at its input: its result aliases an argument it does not write."""
    results = func._schema.returns
    return bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)


def mesh_axis(arguments: Iterable[Any]) -> str:
    """The mesh axis of the group a collective runs on, from its description: "mesh_shard" (DeviceMesh), "shard:0-3"."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                description = torch.distributed.ProcessGroup.unbox(argument).group_desc
            except (RuntimeError, TypeError):  # another script object: a reduce operation
                continue
        elif isinstance(argument, str) and not argument.isalpha():
            description = torch.distributed.distributed_c10d._resolve_process_group(argument).group_desc
        else:
            continue
        return (
            "world"
            if description in ("default_pg", "undefined", "")
            else description.removeprefix("mesh_").partition(":")[0]
        )
    raise ValueError("a collective without a process group among its arguments: counting.mesh_axis must learn its form")
