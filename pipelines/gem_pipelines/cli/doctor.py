"""gemline doctor"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from gem_pipelines.cli.parser import Parser


def main(arguments: Sequence[str]) -> int:
    """Print what this machine can run."""
    Parser(
        prog="gemline doctor", description="Versions, whether they fit, what can run here and why not the rest."
    ).parse_args(arguments)
    from gem_pipelines.doctor import run_doctor

    return run_doctor(Console())
