"""Counting what other libraries send: FSDP2, TorchRec and DDP call torch.distributed, not our Collectives.

Inside `observe_traffic(...)` every collective of torch.distributed that this thread dispatches (backward included) is
counted by the axis of its process group, with the same formulas as CountedCollectives. It changes nothing and costs a
Python call an operation: for tests, for checking a plan's bytes, and for a profiled step; not for every step.

Seen are the operators c10d::* and their functional forms, in torch 2.11 to 2.13. A group that belongs to no axis is
counted under "other:<ranks>".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gem_comm.counted import Traffic
from gem_comm.interface import CommError, Kind
from gem_comm.traffic import sent_bytes


@contextmanager
def observe_traffic(
    groups: Mapping[str, dist.ProcessGroup], traffic: Traffic, *, order: Sequence[str] = ()
) -> Iterator[Traffic]:
    """Count into `traffic` what torch.distributed moves inside.

    groups  axis -> process group (`Meshes.process_groups`). Where axes share a group, the first of `order` (else of
            `groups`) gives its name
    """
    named: dict[str, str] = {}
    for axis in (*order, *groups):
        named.setdefault(groups[axis].group_name, axis)
    with _Observer(named, traffic):
        yield traffic


class _Observer(TorchDispatchMode):
    def __init__(self, axis_of: Mapping[str, str], traffic: Traffic) -> None:
        super().__init__()
        self._axis_of, self._traffic = axis_of, traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._count(name.partition(".")[0], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = {spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if name in _UNCOUNTED:
            return
        if name not in _COUNTERS:
            raise CommError(
                f"observe_traffic does not know the collective {func.name()}; add it to gem_comm/observed.py"
            )
        group = _group(given)
        kind, sent = _COUNTERS[name](given, group)
        ranks = dist.get_process_group_ranks(group)
        axis = self._axis_of.get(group.group_name, f"other:{','.join(map(str, ranks))}")
        self._traffic.add(axis, kind, sent)


def _group(given: Mapping[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        found = given["process_group"]
        return found if isinstance(found, dist.ProcessGroup) else dist.ProcessGroup.unbox(found)
    return torch._C._distributed_c10d._resolve_process_group(given["group_name"])


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


def _plain(kind: Kind, argument: str) -> Callable[[Mapping[str, Any], dist.ProcessGroup], tuple[Kind, int]]:
    """Counters whose volume follows from the bytes of one argument."""

    def count(given: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Kind, int]:
        return kind, sent_bytes(kind, size=group.size(), x_bytes=_bytes(given[argument]))

    return count


def _all_to_all_base(given: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Kind, int]:
    x = given["input"]
    splits = list(given.get("input_split_sizes") or ()) or [x.shape[0] // group.size()] * group.size()
    own = splits[group.rank()] * (_bytes(x) // x.shape[0]) if x.shape[0] else 0
    return "all_to_all", _bytes(x) - own


def _all_to_all_lists(given: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Kind, int]:
    parts = given["input_tensors"]
    return "all_to_all", _bytes(parts) - _bytes(parts[group.rank()])


def _broadcast(given: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Kind, int]:
    x_bytes = _bytes(given["tensors"])
    sent = sent_bytes("broadcast", size=group.size(), x_bytes=x_bytes, rank=group.rank(), source=given["root_rank"])
    return "broadcast", sent


_UNCOUNTED = frozenset({"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_"})
_COUNTERS: dict[str, Callable[[Mapping[str, Any], dist.ProcessGroup], tuple[Kind, int]]] = {
    "_allgather_base_": _plain("all_gather", "input_tensor"),
    "allgather_": _plain("all_gather", "input_tensors"),
    "allgather_into_tensor_coalesced_": _plain("all_gather", "inputs"),
    "allgather_coalesced_": _plain("all_gather", "input_list"),
    "_reduce_scatter_base_": _plain("reduce_scatter", "input_tensor"),
    "reduce_scatter_": _plain("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": _plain("reduce_scatter", "inputs"),
    "allreduce_": _plain("all_reduce", "tensors"),
    "allreduce_coalesced_": _plain("all_reduce", "tensors"),
    "alltoall_base_": _all_to_all_base,
    "alltoall_": _all_to_all_lists,
    "broadcast_": _broadcast,
    "barrier": lambda given, group: ("barrier", 0),
    "all_reduce": _plain("all_reduce", "input"),
    "all_reduce_": _plain("all_reduce", "input"),
    "all_gather_into_tensor": _plain("all_gather", "input"),
    "reduce_scatter_tensor": _plain("reduce_scatter", "input"),
    "all_to_all_single": _all_to_all_base,
}
