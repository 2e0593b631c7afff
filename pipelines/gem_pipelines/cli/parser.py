"""argparse, with mistakes as ConfigError (exit code 1) instead of exit code 2."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from gem_pipelines.errors import ConfigError, did_you_mean


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
        hint = f"; {did_you_mean(unknown.group(1), self.flags())}" if unknown else ""
        raise ConfigError(f"{message}{hint} ('{self.prog} --help' says more)")
