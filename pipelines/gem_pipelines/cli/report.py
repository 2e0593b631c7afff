"""gemline report"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gem_pipelines.cli.parser import Parser


def main(arguments: Sequence[str]) -> int:
    """Write report.html and report.md into a run directory."""
    parser = Parser(prog="gemline report", description="Write report.html and report.md into a run directory.")
    parser.add_argument("run", metavar="RUN", help="a run directory")
    known = parser.parse_args(arguments)
    from gem_pipelines.report import write_report

    print(f"report: {write_report(Path(known.run))}")
    return 0
