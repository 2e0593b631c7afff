"""Dotted overrides of the command line: `["--optimizer.lr", "1e-3"]` on top of a recipe's config.

Keys are checked here first, so that a typing error gets one line with the nearest key; values are parsed by tyro from
the dataclasses' annotations, and its message is passed on in one line.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import tyro

from gem_pipelines.config import RunConfig
from gem_pipelines.config_codec import describe_type, field_types, flatten
from gem_pipelines.errors import ConfigError, did_you_mean


def apply_overrides(config: RunConfig, arguments: Sequence[str], *, own_flags: Sequence[str] = ()) -> RunConfig:
    """`config` with `arguments` ("--key value", "--key=value") applied. Raises ConfigError.

    own_flags  flags of the command itself, which a misspelt one is also compared with
    """
    if not arguments:
        return config
    known = flatten(config)
    check_keys(known, arguments, own_flags=own_flags)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return tyro.cli(
                RunConfig,
                default=config,
                args=_spell_booleans(arguments, known),
                config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
            )
    except SystemExit:
        raise ConfigError(_explain(_one_line(said.getvalue()), arguments)) from None


def check_keys(known: Iterable[str], arguments: Sequence[str], *, own_flags: Sequence[str] = ()) -> None:
    """Raise ConfigError for the first of `arguments` that is no key of `known`, nor the value of one."""
    for argument in arguments:
        if argument.startswith("--"):
            key = argument[2:].split("=", 1)[0].replace("-", "_")
            if key not in known:
                valid = [f"--{name}" for name in known] + list(own_flags)
                raise ConfigError(
                    f"unknown config key {argument[2:].split('=', 1)[0]!r}; {did_you_mean(f'--{key}', valid)}"
                )
    if arguments and not arguments[0].startswith("--"):
        raise ConfigError(f"unexpected argument {arguments[0]!r}: overrides look like --optimizer.lr 1e-3")


def _explain(message: str, arguments: Sequence[str]) -> str:
    """tyro's sentence on a value that it could not read as: key, what came, what was expected."""
    found = re.match(r"Error parsing --([\w.-]+):", message)
    if not found:
        return message
    key = found.group(1).replace("-", "_")
    values = _given(key, arguments)
    kind: Any = RunConfig
    for name in key.split("."):
        kind = field_types(kind)[name]
    return f"{key} is {' '.join(values)!r}, expected {describe_type(kind)}"


def _given(key: str, arguments: Sequence[str]) -> list[str]:
    """The values that follow the last flag of `key`.

    >>> _given("optimizer.lr", ["--train.steps", "3", "--optimizer.lr", "abc"])
    ['abc']
    """
    values: list[str] = []
    mine = False
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument[2:].partition("=")
            mine = flag.replace("-", "_") == key
            values = ([value] if equals else []) if mine else values
        elif mine:
            values.append(argument)
    return values


def _spell_booleans(arguments: Sequence[str], known: dict[str, Any]) -> list[str]:
    """`--train.report false` as well as `False`: tyro takes Python's spelling only."""
    spelt: list[str] = []
    key = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if argument.startswith("--"):
            key = flag[2:].replace("-", "_")
        else:
            value = argument
        if isinstance(known.get(key), bool) and value.lower() in ("true", "false"):
            argument = f"{flag}={value.capitalize()}" if equals else value.capitalize()
        spelt.append(argument)
    return spelt


def _one_line(message: str) -> str:
    """The sentence inside tyro's drawn box, without the frame, the help text and the pointer to --help."""
    lines = [re.sub(r"[\u2500-\u257f]|-{5,}", "", line).strip() for line in message.splitlines()]
    kept: list[str] = []
    for line in lines:
        if line.startswith(("Argument helptext", "For full helptext", "Perhaps you meant")):
            break
        if line and line not in ("Value error", "Invalid choice", "Parsing error"):
            kept.append(line)
    return " ".join(kept) or f"the overrides could not be parsed: {message.strip() or sys.argv}"
