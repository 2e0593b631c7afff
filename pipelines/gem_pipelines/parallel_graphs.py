"""CUDA graphs for the parts of a step whose shapes never change, so that the host launches each with one call.

A step of short kernels is as fast as the host launches them, and a matrix product costs the host about as much as ten
other kernels (the library chooses a kernel anew at each call). Sequences change their number of tokens at every batch
and cannot be replayed; summaries behind their attention, interactions and heads see (B, tokens, D) only, and hold most
of the products. torch.cuda.make_graphed_callables records each with its backward, in the order of the forward pass.

What a graph reads and writes lies at fixed addresses. So parameters must stay where they are: not with FSDP2, which
gathers them elsewhere. And a gradient lies where the next backward writes: not with several micro-batches a step. Both
are refused, and so is what makes another number of rows in every batch: requests, of their impressions, and free counts
of the balancer. A batch of another number of rows (the last of an epoch, or one that lacks damaged rows), and every
pass without gradient, runs the part as it is.

Only `forward` is replaced: names of parameters and checkpoints do not change. Bits do not either: the same kernels run.
Cost: the activations of these parts stay allocated; a second or so at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gem_data.interface import Schema
from torch import Tensor, nn

from gem_pipelines.config import RunConfig
from gem_pipelines.errors import ConfigError

Recorder = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], Any]


def check_graphs(config: RunConfig, device: torch.device, schema: Schema, *, world_size: int = 1) -> None:
    """Raise ConfigError where `model.graphs` cannot be had, with the reason."""
    if not config.model.graphs:
        return
    if schema.impression:
        raise ConfigError(
            f"model.graphs is {config.model.graphs}, and rows of {schema.name!r} are requests (of impressions with "
            f"{', '.join(schema.impression)} of their own): every batch has another number of impressions, which no "
            "graph fits. Set model.graphs to (), or train plain samples ('gemline data impressions' makes them)"
        )
    if device.type != "cuda":
        raise ConfigError(f"model.graphs is {config.model.graphs}: CUDA graphs need train.device 'cuda', not {device}")
    reasons = {
        "parallel.shard": (config.parallel.shard, "FSDP2 moves parameters, graphs read them at fixed addresses"),
        "parallel.expert": (config.parallel.expert, "experts exchange rows whose number changes"),
        "data.accumulate": (config.data.accumulate, "each backward writes gradients to the same place"),
    }
    for key, (value, why) in reasons.items():
        if value != 1:
            raise ConfigError(f"model.graphs needs {key} 1, got {value}: {why}")
    if config.balance.budget is not None:
        raise ConfigError("model.graphs needs no balance.budget: each backward writes gradients to the same place")
    if config.balance.method == "global" and config.balance.counts == "free":
        raise ConfigError(
            "model.graphs needs balance.counts 'equal', got 'free' with balance.method 'global': every batch has "
            "another number of rows on a process, which no graph fits"
        )
    if config.data.global_batch_size % world_size:
        raise ConfigError(
            f"model.graphs needs a data.global_batch_size that {world_size} processes share evenly, got "
            f"{config.data.global_batch_size}: graphs are recorded for one number of rows"
        )


class _Finish(nn.Module):
    """What follows a summary's attention; holds its parameters, under other names, only while it is recorded."""

    def __init__(self, summary: nn.Module) -> None:
        super().__init__()
        tokens = summary.tokens
        own = [tokens.pool.out, getattr(tokens, "gate", None), getattr(tokens, "compress", None)]
        self.used = nn.ModuleList(
            module for module in (*own, summary.norm, summary.project) if isinstance(module, nn.Module)
        )
        self._finish = summary.finish

    def forward(self, *parts: Tensor) -> Tensor:
        return self._finish(*parts)


def graph_parts(
    model: nn.Module,
    parts: Sequence[str],
    *,
    rows: int,
    device: torch.device,
    record: Recorder = torch.cuda.make_graphed_callables,
) -> None:
    """Record `parts` of `model`, whose parameters are where they stay, for batches of `rows` rows.

    record  for tests: takes modules and inputs, and replaces the modules' forward
    """
    if not parts:
        return
    dtype = torch.bfloat16 if model.compute == "bfloat16" else next(model.parameters()).dtype

    def empty(*shape: int) -> Tensor:
        return torch.zeros(rows, *shape, device=device, dtype=dtype, requires_grad=True)

    width, plan, found = model.features.dim, model.plan, []
    for index, layer in enumerate(model.layers):
        if "summaries" in parts:
            found += [_summary(summary, empty) for summary in layer.summaries.values()]
        if "interaction" in parts:
            tokens = plan.tokens_in[index] + plan.summary_tokens
            found.append((layer.interaction, layer.interaction, "forward", (empty(tokens, width),)))
    if "summaries" in parts:
        found += [_summary(summary, empty) for summary in model.last_summaries.values()]
    if "heads" in parts:
        found.append(
            (model.heads, model.heads, "forward", (empty((plan.tokens_in[-1] + plan.summary_tokens) * width),))
        )
    plain = [getattr(owner, name) for owner, _, name, _ in found]
    record(tuple(module for _, module, _, _ in found), tuple(inputs for *_, inputs in found))
    for (owner, module, name, inputs), own in zip(found, plain, strict=True):
        setattr(owner, name, _for_shapes(module.forward, own, inputs))


def _summary(summary: nn.Module, empty: Callable[..., Tensor]) -> tuple[nn.Module, nn.Module, str, tuple[Tensor, ...]]:
    pool = summary.tokens.pool
    seeds, dim = pool.seeds_SD.shape
    inputs = (empty(seeds, dim), *(empty(count, dim) for count in summary.tokens.extra_tokens))
    return summary, _Finish(summary), "finish", inputs


def _for_shapes(
    recorded: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Callable[..., Tensor]:
    shapes = [(one.shape, one.dtype) for one in inputs]

    def call(*given: Tensor) -> Tensor:
        fits = torch.is_grad_enabled() and [(one.shape, one.dtype) for one in given] == shapes
        return recorded(*given) if fits else plain(*given)

    return call
