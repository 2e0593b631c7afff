"""gemline train"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gem_pipelines.cli.parser import Parser
from gem_pipelines.config import RunConfig
from gem_pipelines.config_codec import flatten
from gem_pipelines.config_overrides import apply_overrides, check_keys
from gem_pipelines.errors import ConfigError, RunError
from gem_pipelines.recipes import RECIPES, find_recipe
from gem_pipelines.refusals import refusals_noted
from gem_pipelines.restarts import RestartLoopError, earlier_verdict
from gem_pipelines.rundir import RunDirectory

_FLAGS = ("--recipe", "--data", "--run-dir", "--resume", "--auto-resume", "--traceback")
_NOT_REPEATED = ("--run-dir",)


def main(arguments: Sequence[str], *, launcher: int | None = None) -> int:
    """Train; prints the result on rank 0. launcher: what launcher_process() said when this process began."""
    with refusals_noted():
        known, overrides = _parser().parse_known_args(arguments)
        automatic = known.auto_resume or restarted()
        if automatic:
            refuse_restart(known.run_dir)
        config = _resolve(known, overrides)
    from gem_pipelines.cli.outcome_table import print_outcome
    from gem_pipelines.job import Request, run

    run_dir = Path(known.run_dir) if known.run_dir else None
    command = repeat_command(arguments, resume=known.resume)
    request = Request(
        config=config,
        run_dir=run_dir,
        resume=known.resume,
        command=command,
        automatic=automatic,
        launcher=launcher,
        cost_given=known.resume and not automatic and any(o.split("=", 1)[0] == "--balance.cost" for o in overrides),
    )
    outcome = run(request)
    if outcome is not None:
        print_outcome(outcome)
        if config.train.report:
            from gem_pipelines.report import write_report

            print(f"report: {write_report(outcome.run_dir)}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="gemline train",
        description="Train a model. Any value of the config is changed by its dotted name: --optimizer.lr 1e-3",
        epilog=_list_keys(find_recipe("debug")),
    )
    parser.add_argument("--recipe", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument(
        "--data", help="a directory with schema.json, or the name of a data set (short for --data.source)"
    )
    parser.add_argument("--run-dir", help="where the run is written (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir from its newest sound checkpoint"
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="begin, or go on where --run-dir holds a run: for starts that nobody decides on (restarts by a scheduler)",
    )
    return parser


def restarted() -> bool:
    """Whether torchrun started this process again, after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def refuse_restart(run_dir: str | None) -> None:
    """Raise where an automatic start cannot, or should not, be made; before data and model are touched."""
    if run_dir is None:
        raise ConfigError("a run that is restarted by itself needs --run-dir: else every start is another run")
    verdict = earlier_verdict(RunDirectory(Path(run_dir)).supervision)
    if verdict:
        raise RestartLoopError(f"{verdict}. To go on nevertheless: gemline train --resume --run-dir {run_dir}")


def _resolve(known: Any, overrides: list[str]) -> RunConfig:
    """Recipe or saved config, with overrides."""
    if known.resume:
        if not known.run_dir:
            raise ConfigError("--resume needs --run-dir: which run?")
        if known.recipe:
            raise ConfigError("--resume takes the config of the run itself; leave out --recipe (overrides are allowed)")
        config = RunDirectory(Path(known.run_dir)).read_config()
    else:
        config = recipe_config(known.recipe, overrides, own_flags=_FLAGS)
    return with_overrides(config, known.data, overrides, own_flags=_FLAGS)


def recipe_config(recipe: str | None, overrides: Sequence[str], *, own_flags: tuple[str, ...]) -> RunConfig:
    """The config of a recipe that the command line must name. overrides: told first where one is misspelt."""
    if not recipe:
        check_keys(flatten(find_recipe("debug")), overrides, own_flags=own_flags)  # keys are those of all recipes
        raise ConfigError(f"--recipe is missing; one of: {', '.join(RECIPES)}")
    return find_recipe(recipe)


def with_overrides(
    config: RunConfig, data: str | None, overrides: list[str], *, own_flags: tuple[str, ...]
) -> RunConfig:
    """`config` with --data and the dotted values of the command line."""
    if data:
        config = replace(config, data=replace(config.data, source=data, options=_kept_options(config, data)))
    config = apply_overrides(config, overrides, own_flags=own_flags)
    given = {argument.split("=", 1)[0].replace("_", "-") for argument in overrides}
    if "--data.options" in given and config.data.options and (Path(config.data.source) / "schema.json").is_file():
        raise ConfigError(
            f"data.options is {', '.join(config.data.options)}: options make a named data set, and data.source is a "
            f"directory, {config.data.source!r}: leave them out"
        )
    return config


def _kept_options(config: RunConfig, source: str) -> tuple[str, ...]:
    """A recipe's data options belong to the recipe's data set."""
    return config.data.options if source == config.data.source else ()


def _list_keys(config: RunConfig) -> str:
    lines = [f"  --{key} {value!r}" for key, value in flatten(config).items()]
    return f"config keys, with the values of recipe {config.name!r}:\n" + "\n".join(lines)


def repeat_command(arguments: Sequence[str], *, resume: bool = False) -> str:
    """The command that repeats this run: as given, without the run directory (a run is not overwritten).

    One that resumes keeps it: it goes on with that run.
    """
    if resume:
        return shlex.join([*_program(), "train", *arguments])
    kept, skip = [], False
    for argument in (a for a in arguments if a != "--auto-resume"):
        if skip:
            skip = False
        elif argument in _NOT_REPEATED:
            skip = True
        elif not argument.startswith(tuple(f"{flag}=" for flag in _NOT_REPEATED)):
            kept.append(argument)
    return shlex.join([*_program(), "train", *kept])


def _program() -> list[str]:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return ["gemline"]
    local, world = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ["WORLD_SIZE"]
    if not local.isdigit() or not world.isdigit() or int(local) < 1:
        raise RunError(
            f"WORLD_SIZE is {world!r} and LOCAL_WORLD_SIZE {local!r}, expected positive numbers; start with torchrun"
        )
    return ["torchrun", "--nnodes", str(int(world) // int(local)), "--nproc-per-node", local, "-m", "gem_pipelines"]
