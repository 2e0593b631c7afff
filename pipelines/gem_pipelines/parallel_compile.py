"""torch.compile for parts of the dense model, each by itself, so that what cannot be traced stays as it is.

Jagged attention, collectives (experts, FSDP2) and hooks stay outside of every compiled part: fewer launches and passes
over memory are to be had in the parts of fixed width, and each of those is one graph without a break. Only `forward` is
replaced, so parameters keep their names, hooks see the same modules, and a checkpoint does not show what was compiled.

Where experts are spread over ranks each expert is compiled, and the exchange between them is not. A shape that changes
(the rows of an evaluation batch) is compiled once more, and is symbolic from then on.

Cost: tens of seconds at the first step of each kind (training, evaluation) on CUDA, kept by torch's cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gem_pipelines.parallel_experts import experts_in

COMPILATIONS = 8
"""Of one module: for training and evaluation, the first sizes and symbolic ones."""


def compiled_modules(model: nn.Module, parts: Sequence[str]) -> list[nn.Module]:
    """The modules that `parts` ("features", "interaction", "heads") name, after experts were placed."""
    found: list[nn.Module] = []
    if "features" in parts:
        found.append(model.features)
    if "interaction" in parts:
        experts = experts_in(model)
        found += experts or [layer.interaction for layer in model.layers]
    if "heads" in parts:
        found.append(model.heads)
    return found


def compile_parts(model: nn.Module, parts: Sequence[str], *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile `parts` of `model` in place, when they first run. Raises torch's errors then, never falls back."""
    if not parts:
        return
    config = torch._dynamo.config
    # DDP would have every graph cut where one of its buckets ends; these parts are smaller than what it is for.
    config.optimize_ddp = False
    modules = compiled_modules(model, parts)
    # Dynamo counts compilations by code, so all layers and experts of a class share one limit.
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, limit, max(getattr(config, limit), COMPILATIONS * len(modules)))
    for module in modules:
        module.forward = torch.compile(module.forward, backend=backend, fullgraph=True)
