"""Where the parameters of the dense model are: whole on every rank, or cut over ranks (FSDP2) and experts.

`WholeParameters` and `ShardedParameters` answer the same questions for the optimizer and the checkpoint: the canonical
names and shapes, whole tensors from this rank's parts, this rank's part of a whole tensor, and the gradient's norm.
Names and whole tensors never depend on the mesh; that is what lets a run resume on another one.

FSDP2: each layer is a unit, so are a rank's experts (on their own, smaller mesh; where that is one rank, they are plain
parameters), the rest is the root's. On the mesh
("replicate", "shard_expert") it gathers and reduce-scatters within a copy and all-reduces 1 / (shard * expert) of the
gradients across copies. Its mean over the mesh is what loss.py scales for. Where the model computes in bfloat16, layers
and experts gather bfloat16 and reduce float32; the root's parameters (first tokens, summaries, heads) stay float32.

Cost of `gather`: every tensor whole on every rank's CPU, one after the other through the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Protocol

import torch
from gem_comm.interface import Collectives, Meshes
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

Shapes = dict[str, tuple[int, ...]]

# Of a layer that computes in bfloat16: its parameters are cast before they are gathered, half the bytes, and gradients
# are added up in float32. Inputs have their dtype already.
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class Placement(Protocol):
    """What the optimizer and the checkpoint ask; see the module's docstring.

    shapes           canonical name of every parameter of the whole model -> its shape
    gather(parts, owner_of)   canonical key -> whole tensor on the CPU, of every key that some rank has; owner_of: every
                     key that can exist -> the parameter it belongs to. A collective where parameters are cut
    cut(whole, like) this rank's part of a whole tensor, placed as `like` is
    clip(parameters, limit)   clip the gradients to a global norm of `limit` (inf: not at all); returns the norm before
    """

    shapes: Shapes

    def gather(self, parts: Mapping[str, Tensor], owner_of: Mapping[str, str]) -> dict[str, Tensor]: ...

    def cut(self, whole: Tensor, like: Tensor) -> Tensor: ...

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor: ...


class WholeParameters:
    """Every rank has everything."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in named}

    def gather(self, parts: Mapping[str, Tensor], owner_of: Mapping[str, str]) -> dict[str, Tensor]:
        return dict(parts)

    def cut(self, whole: Tensor, like: Tensor) -> Tensor:
        return whole.to(like.device, copy=True)

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if math.isfinite(limit):
            torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


class ShardedParameters:
    """Parameters cut by FSDP2; experts only on the ranks that own them.

    shapes  of the whole model, taken before it was cut
    shard   collectives over "shard_expert": its ranks hold one copy of the model together, experts included
    expert  collectives over "expert"
    owners  prefix of an expert's parameters -> position of its owner on the expert axis
    """

    def __init__(self, shapes: Shapes, *, shard: Collectives, expert: Collectives, owners: Mapping[str, int]) -> None:
        self.shapes = shapes
        self._shard, self._expert = shard, expert
        self._owner = {n: next((o for p, o in owners.items() if n.startswith(p)), None) for n in shapes}

    def gather(self, parts: Mapping[str, Tensor], owner_of: Mapping[str, str]) -> dict[str, Tensor]:
        spread = [key for key, name in owner_of.items() if self._owner.get(name) is not None]
        present = self._present(spread, parts)
        found: dict[str, Tensor] = {}
        for key, name in owner_of.items():
            owner = self._owner.get(name)
            if owner is None:
                if key in parts:
                    found[key] = _whole(parts[key]).cpu()
            elif present[key][owner]:
                found[key] = self._from_owner(key, name, owner, parts)
        return found

    def _present(self, keys: list[str], parts: Mapping[str, Tensor]) -> dict[str, list[bool]]:
        """Key -> which ranks of the expert group have it."""
        if not keys:
            return {}
        device = next((part.device for part in parts.values() if isinstance(part, DTensor)), torch.device("cpu"))
        mine = torch.tensor([key in parts for key in keys], dtype=torch.uint8, device=device)
        every_EK = self._expert.all_gather(mine).view(self._expert.size, len(keys)).bool().tolist()
        return {key: [row[number] for row in every_EK] for number, key in enumerate(keys)}

    def _from_owner(self, key: str, name: str, owner: int, parts: Mapping[str, Tensor]) -> Tensor:
        mine = self._expert.rank == owner
        anything = next(iter(parts.values()))
        shape = () if key.endswith(".step") else self.shapes[name]
        if mine:
            whole = _whole(parts[key]).to(anything.device).reshape(-1)
        else:
            whole = torch.empty(math.prod(shape), dtype=torch.float32, device=anything.device)
        return self._expert.broadcast(whole, source=owner).reshape(shape).cpu()

    def cut(self, whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return whole.to(like.device, copy=True)
        # Every rank has the whole, so each takes its part and nothing is sent.
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """The ranks of "shard_expert" hold every number of the model once, so one sum of squares over them is all."""
        grads = [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        present = [grad for grad in grads if grad.numel()]
        # Two launches for all, where one a gradient would take more host time than the device needs for them.
        norms = torch.stack(torch._foreach_norm(present) or [torch.zeros((), device=grads[0].device)])
        norm = self._shard.all_reduce(norms.square().sum().view(1)).sqrt().squeeze(0)
        if math.isfinite(limit) and present:
            torch._foreach_mul_(present, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _whole(part: Tensor) -> Tensor:
    return part.full_tensor() if isinstance(part, DTensor) else part


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, as a plain tensor on the same memory, without gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # then it is an attribute; anything else goes through DTensor's dispatch, 50 us or more
        return tensor.to_local()


def as_part_of(part: Tensor, like: Tensor) -> Tensor:
    """Inverse of `own_part` for a tensor that is cut as `like` is."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_parameters(
    model: nn.Module, meshes: Meshes, experts: Iterable[nn.Module], *, reshard: bool = True
) -> nn.Module:
    """Cut the parameters of `model` in place: experts over "shard", all others over "shard_expert".

    reshard: as in ParallelConfig. Each layer gathers the next one's parameters before it computes, so that a host which
    is just ahead of the device does not make it wait for them.
    """
    # Some members end in a view; it is only ever stacked, never changed in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mixed = {"mp_policy": MIXED} if getattr(model, "compute", "float32") == "bfloat16" else {}
    alone: set[nn.Parameter] = set()  # of experts that no other rank holds a part or a copy of
    for expert in experts:
        if meshes.experts.size() == 1:
            alone.update(expert.parameters())
        else:
            fully_shard(expert, mesh=meshes.experts, reshard_after_forward=reshard, **mixed)
    for layer in model.layers:
        fully_shard(layer, mesh=meshes.shared, reshard_after_forward=reshard, ignored_params=alone, **mixed)
    fully_shard(model, mesh=meshes.shared, reshard_after_forward=False, ignored_params=alone)
    for layer, coming in pairwise(model.layers):
        layer.set_modules_to_forward_prefetch([coming])
    for module in model.modules():
        # A rank that did not use a parameter must still bring its zeros. torch before 2.13 has no such switch; the
        # models here give every parameter a gradient on every batch, which tests/pipelines/test_parallel.py holds.
        if isinstance(module, FSDPModule) and hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
    return model


def load_whole(model: nn.Module, state: Mapping[str, Tensor], placement: Placement) -> None:
    """Write whole tensors into the model's parameters and buffers; names were checked by the caller."""
    for name, part in model.state_dict().items():
        piece = placement.cut(state[name], part)
        own_part(part).copy_(own_part(piece))
