"""Recipes: functions that return a complete RunConfig. `gemline train --recipe NAME` calls one by name.

To add one, write a module here with a function of the same name and put it into RECIPES.
"""

from __future__ import annotations

from collections.abc import Callable

from gem_pipelines.config import RunConfig
from gem_pipelines.errors import ConfigError, did_you_mean
from gem_pipelines.recipes.debug import debug
from gem_pipelines.recipes.dynamic_cpu import dynamic_cpu
from gem_pipelines.recipes.ml100k_cpu import ml100k_cpu
from gem_pipelines.recipes.synthetic_cpu import synthetic_cpu

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "debug": debug,
    "dynamic_cpu": dynamic_cpu,
    "ml100k_cpu": ml100k_cpu,
    "synthetic_cpu": synthetic_cpu,
}


def find_recipe(name: str) -> RunConfig:
    """The config of recipe `name`; ConfigError with the nearest name otherwise."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {did_you_mean(name, RECIPES)}")
    return RECIPES[name]()
