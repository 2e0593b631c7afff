"""`gemline` on a rank whose working directory is its own, as on hosts without a common file system."""

from __future__ import annotations

import os
from pathlib import Path

from gem_pipelines.cli import main as gemline


def main(folders: str, code: str, *arguments: str) -> None:
    """`folders` holds one named after each rank; gemline must end with `code`."""
    os.chdir(Path(folders) / os.environ["RANK"])
    assert gemline(list(arguments)) == int(code)
