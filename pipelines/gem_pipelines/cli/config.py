"""gemline config show"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gem_pipelines.cli.parser import Parser
from gem_pipelines.config_codec import flatten, to_json
from gem_pipelines.config_overrides import apply_overrides, check_keys
from gem_pipelines.errors import ConfigError
from gem_pipelines.recipes import RECIPES, find_recipe
from gem_pipelines.rundir import RunDirectory


def main(arguments: Sequence[str]) -> int:
    """Print the resolved config as JSON."""
    parser = Parser(
        prog="gemline config",
        description="Print the resolved config of a recipe or of a run, with overrides applied, as JSON.",
    )
    parser.add_argument("verb", choices=["show"])
    parser.add_argument("--recipe", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("--run", help="a run directory")
    known, overrides = parser.parse_known_args(arguments)
    check_keys(flatten(find_recipe("debug")), overrides, own_flags=("--recipe", "--run"))  # keys are those of all
    if bool(known.recipe) == bool(known.run):
        raise ConfigError(f"config show needs --recipe or --run (one of the two); recipes: {', '.join(RECIPES)}")
    config = find_recipe(known.recipe) if known.recipe else RunDirectory(Path(known.run)).read_config()
    config = apply_overrides(config, overrides, own_flags=("--recipe", "--run"))
    print(json.dumps(to_json(config), indent=2))
    return 0
