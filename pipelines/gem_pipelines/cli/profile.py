"""gemline profile"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gem_pipelines.cli.parser import Parser
from gem_pipelines.cli.train import recipe_config, with_overrides
from gem_pipelines.config import BalanceConfig, RunConfig
from gem_pipelines.errors import ConfigError
from gem_pipelines.recipes import RECIPES

if TYPE_CHECKING:
    from gem_data.interface import CostTerm

    from gem_pipelines.cost_fit import Fitted


def main(arguments: Sequence[str]) -> int:
    """Measure; prints the fitted cost of a row and its error."""
    parser = Parser(
        prog="gemline profile",
        description="Measure training steps of batches of many shapes, and fit what a row costs: seconds, and bytes "
        "kept for backward, by stream, window and mask. balance.cost takes the file.",
    )
    parser.add_argument("--fit-cost", action="store_true", help="fit the cost of a row (the one thing it does)")
    parser.add_argument("--recipe", help=f"one of {', '.join(RECIPES)}; its values change by dotted name as in train")
    parser.add_argument("--data", help="a directory with schema.json, or the name of a data set")
    parser.add_argument("--out", default="cost.json", help="the file to write (default: cost.json)")
    parser.add_argument("--batches", type=int, default=48, help="batches to measure; every fourth is held out")
    parser.add_argument("--repeats", type=int, default=3, help="steps a batch; the median counts")
    known, overrides = parser.parse_known_args(arguments)
    if not known.fit_cost:
        raise ConfigError("say what to do: gemline profile --fit-cost")
    for name in ("batches", "repeats"):
        if getattr(known, name) < 1:
            raise ConfigError(f"--{name} is {getattr(known, name)}, expected at least 1")
    out = Path(known.out)
    _check_out(out)
    flags = tuple(parser.flags())
    config = with_overrides(
        recipe_config(known.recipe, overrides, own_flags=flags), known.data, overrides, own_flags=flags
    )
    if config.balance.budget is not None:
        print("balance.budget: left out, batches are measured whole")
    # Nor is a cost read: what is measured may be the file that balance.cost is to name.
    config = replace(config, balance=BalanceConfig())
    content, fitted = _measure(config, batches=known.batches, repeats=known.repeats)
    out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print("\n".join([*describe(fitted), f"written: {out} (use it with --balance.cost {out})"]))
    return 0


def _check_out(out: Path) -> None:
    """Raise ConfigError where the file could not be written, before minutes are spent on what it is to hold."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out is {str(out)!r}, expected a file in a directory that exists")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"--out is {str(out)!r}, expected a place that can be written")


def _measure(config: RunConfig, *, batches: int, repeats: int) -> tuple[dict[str, Any], dict[str, Fitted]]:
    """(what the file holds, the fits)."""
    import tempfile

    from gem_pipelines.cost_fit import check_batches, draw_lengths, fit, measure_steps, to_file
    from gem_pipelines.data_source import data_directory, trained_schema
    from gem_pipelines.job import build
    from gem_pipelines.rundir import RunDirectory
    from gem_pipelines.runtime import start_runtime

    train = config.train
    runtime = start_runtime(
        device=train.device,
        threads=train.threads,
        deterministic=train.deterministic,
        timeout=timedelta(seconds=train.timeout_s),
    )
    try:
        if runtime.world_size > 1:
            raise ConfigError("gemline profile measures one process: start it without torchrun")
        data = data_directory(config.data, runtime=runtime, say=print)
        check_batches(trained_schema(data, config.data), config.model, batches=batches)
        with tempfile.TemporaryDirectory() as scratch:
            job = build(config, data=data, directory=RunDirectory(Path(scratch) / "run"), runtime=runtime)
            lengths = draw_lengths(
                job.schema, most_rows=config.data.global_batch_size, batches=batches, seed=config.train.seed
            )
            fitted = fit(job.trainer, measure_steps(job.trainer, lengths, repeats=repeats, seed=config.train.seed))
            job.loader.close()
        return to_file(fitted, recipe=config.name, device=runtime.device), fitted
    finally:
        runtime.close()


def describe(fitted: dict[str, Fitted]) -> list[str]:
    """Every unknown of the fits, and their errors."""
    lines = []
    for name, found in fitted.items():
        model = found.model
        lines.append(f"{name}: {model.unit}; {model.per_step:.4g} a step, {model.per_sample:.4g} a row")
        if found.requests:
            lines[-1] += f", {model.per_impression:.4g} an impression beyond a row's first"
        lines += [f"    {term.stream}: {term.coefficient:.4g} a {_counted(term)}" for term in model.terms]
        for which, error in (("fit", found.on_fit), ("held out", found.held_out)):
            lines.append(f"    error, {which}: mean {error.mean:.1%}, worst {error.worst:.1%} of {error.count} batches")
    return lines


def _counted(term: CostTerm) -> str:
    """What one unit of a term is: 'causal pair within 4, targets 1'."""
    what = "token"
    if term.pairs:
        what = ("causal " if term.causal else "") + "pair" + (f" within {term.window}" if term.window else "")
    if term.extra:
        what += f", {term.extra} more than events"
    if term.repeated:
        return f"{what}, for every impression"
    return what + (f", {term.targets} more for every further impression" if term.targets else "")
