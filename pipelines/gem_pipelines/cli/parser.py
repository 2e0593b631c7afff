"""argparse, with mistakes as ConfigError (exit code 1) instead of exit code 2."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from gem_pipelines.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and raises."""

    def __init__(self, *, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def flags(self) -> list[str]:
        """Every flag of its own, as "--name"."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def error(self, message: str) -> NoReturn:
        """One line, with the nearest flag where one is unknown."""
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        near = difflib.get_close_matches(unknown.group(1), self._option_string_actions, n=1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{message}{hint} ('{self.prog} --help' says more)")
