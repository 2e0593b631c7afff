"""Whether the copies of parameters, moments and tables are still the same bits, and which rank drifted if not.

Copies are kept equal without ever being compared: they start equal and apply equal updates. A bit that flips in the
memory of one rank therefore stays there and spreads through the averaged gradients. Every replica_check_every steps,
and before every checkpoint, each rank sums the bits of what it holds in copy; the sums of a group are compared.

On the CPU the bits of a tensor are summed up by xxh3-64. On a GPU by two sums of its 32-bit words, wrapping at 2^64:
plain, which any single changed word changes, and weighted by position, which notices two words that changed places.

Three copies or more: the rank that differs from the majority drifted. Two copies cannot outvote each other: both are
named with their values at the first element that differs. If one of these is further from the rest of the tensor by a
factor of UNUSUAL or more, as a flipped bit of an exponent makes it, that rank is called probable; else nothing is said.

Cost: one read of parameters, moments and tables in copy, and one all-gather of 16 bytes a tensor and group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from gem_pipelines.errors import RunError
from gem_pipelines.optimizer import DenseOptimizer
from gem_pipelines.parallelize import ParallelModel
from gem_pipelines.runtime import Runtime

CHUNK = 1 << 20
UNUSUAL = 8.0


class ReplicaError(RunError):
    """Copies that must be equal are not; names tensor and rank."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """What the ranks of one group hold in copy: name -> this rank's part. axis: for messages."""

    axis: str
    group: Any
    tensors: Mapping[str, Tensor]


def copied_tensors(parallel: ParallelModel, optimizer: DenseOptimizer, runtime: Runtime) -> list[Copied]:
    """What is held more than once in this run, by the group that holds it.

    Id maps are on all ranks; with copies of the tables they are compared between these, not inside of one.
    """
    if runtime.world_size == 1:
        return []
    meshes = parallel.meshes
    dense = {f"dense.{name}": _local(value) for name, value in parallel.module.state_dict().items()}
    for name in optimizer.named:
        dense |= {f"optimizer.{name}.{key}": part for key, part in optimizer.own_state(name).items() if key != "step"}
    group = dist.group.WORLD if meshes is None else meshes.process_groups["replicate"]
    found = [Copied(axis="replicate", group=group, tensors=dense)]
    tables = {f"tables.{name}": part for name, part in parallel.tables.copied_parts().items()}
    if meshes is not None and meshes.layout.spec.table_replica > 1:
        found.append(Copied(axis="table_replica", group=meshes.process_groups["table_replica"], tensors=tables))
    elif tables:  # data_parallel ones and id maps
        found.append(Copied(axis="world", group=dist.group.WORLD, tensors=tables))
    return [copied for copied in found if dist.get_world_size(copied.group) > 1]


def check_replicas(copied: Sequence[Copied], runtime: Runtime, *, step: int) -> int:
    """Raise ReplicaError on every rank where copies differ on any. Returns the bytes compared here. A collective."""
    messages, compared = [], 0
    for one in copied:
        mine = checksums(one.tensors.values()).to(runtime.device)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(one.group))]
        dist.all_gather(every, mine, group=one.group)
        compared += sum(tensor.numel() * tensor.element_size() for tensor in one.tensors.values())
        sums_MK = [tuple(map(tuple, sums.tolist())) for sums in every]
        for number, (name, tensor) in enumerate(one.tensors.items()):
            if len({sums[number] for sums in sums_MK}) > 1:
                messages.append(_describe(one, name, tensor, [sums[number] for sums in sums_MK]))
                break  # the first tensor names the rank; the others follow from it
    texts = [text for text in runtime.gather_text("; ".join(messages)) if text] if runtime.world_size > 1 else messages
    if texts:
        raise ReplicaError(
            f"step {step}: copies that must be equal differ: {' | '.join(dict.fromkeys(texts))}. Training them on "
            "would spread the difference: no checkpoint is written. Resume from the newest one; without the host of "
            "that rank, if it happens again."
        )
    return compared


def checksums(tensors: Any) -> Tensor:
    """(K, 2) int64, on the tensors' device: what is equal for equal bits, and differs for others."""
    rows = []
    for tensor in tensors:
        words = _words(tensor)
        if words.device.type == "cpu":
            digest = int.from_bytes(xxhash.xxh3_64_digest(words.numpy()), "big", signed=True)
            rows.append(torch.tensor([digest, 0]))
            continue
        rows.append(word_sums(words))
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64)


def word_sums(words: Tensor) -> Tensor:
    """(2,) int64: the plain and the weighted sum of the words, modulo 2^64."""
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros_like(plain)
    for number, chunk in enumerate(words.split(CHUNK)):
        wide = chunk.long()
        plain += wide.sum()
        weighted += (wide * torch.arange(1, wide.numel() + 1, device=wide.device)).sum() * (2 * number + 1)
    return torch.stack([plain, weighted])


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    width = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[flat.element_size()]
    return flat.view(width)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _describe(copied: Copied, name: str, tensor: Tensor, sums: list[tuple[int, ...]]) -> str:
    """Which rank drifted, as far as can be told. A collective of the group."""
    ranks = dist.get_process_group_ranks(copied.group)
    index, values = _first_difference(copied.group, tensor)
    shown = ", ".join(f"rank {rank}: {value!r}" for rank, value in zip(ranks, values, strict=True))
    where = f"{name} over axis {copied.axis} (ranks {', '.join(map(str, ranks))}), first at element {index}: {shown}"
    most, count = Counter(sums).most_common(1)[0]
    if 2 * count > len(sums):
        drifted = [rank for rank, own in zip(ranks, sums, strict=True) if own != most]
        return f"rank {', '.join(map(str, drifted))} drifted from the others: {where}"
    usual = tensor.detach().float().abs().median().clamp(min=1e-30).log()
    far = [abs(float(torch.tensor(value).abs().clamp(1e-45, 3e38).log() - usual)) for value in values]
    if max(far) - min(far) < math.log(UNUSUAL):
        return f"rank {' or '.join(map(str, ranks))} drifted, which of them cannot be told from two copies: {where}"
    suspect = ranks[far.index(max(far))]
    return f"rank {suspect} probably drifted (its value is further from the rest of the tensor): {where}"


def _first_difference(group: Any, tensor: Tensor) -> tuple[int, list[float]]:
    """Index of the first element that differs within the group, and every rank's value there."""
    flat = tensor.detach().contiguous().view(-1)
    for number, chunk in enumerate(flat.split(CHUNK)):
        every = [torch.empty_like(chunk) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, chunk.contiguous(), group=group)
        differs = torch.stack([_words(part) != _words(every[0]) for part in every]).any(0)
        if bool(differs.any()):
            word = int(differs.nonzero()[0])
            place = word * _words(chunk).element_size() // chunk.element_size()
            return number * CHUNK + place, [float(part[place]) for part in every]
    raise AssertionError("sums differ, elements do not")
