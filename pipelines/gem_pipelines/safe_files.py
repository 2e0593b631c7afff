"""Files of a run, read and written only inside its directory, and never more of them than memory holds.

A run directory may come from somebody else, to be resumed or reported. A link in it could make a run append its records
to any file of the user's, or read any; a JSON file could be nested or large beyond all use. What runs write there are
plain files and directories, so links are refused as a whole, before anything is opened. The run directory itself may be
reached through a link: that is the user's own.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from gem_pipelines.errors import RunError

MAX_JSON_BYTES = 16 << 20


def refuse_links(directory: Path) -> None:
    """Raise RunError where `directory` holds a link, or anything but files and directories, at any depth."""
    for parent, directories, files in os.walk(directory, followlinks=False):
        for name in [*directories, *files]:
            path = Path(parent) / name
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # removed meanwhile by the job that runs here
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = f"a link to {os.readlink(path)}" if stat.S_ISLNK(mode) else "neither a file nor a directory"
                raise RunError(
                    f"{path} is {kind}; nothing of a run is read or written through it: put a copy in its place, or "
                    "remove it"
                )


def read_json(path: Path, *, limit_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a small JSON file. Raises RunError where it is too large, too deep, or no JSON."""
    size = path.stat().st_size
    if size > limit_bytes:
        raise RunError(f"{path} has {size} bytes, expected at most {limit_bytes}")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from None


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable: a file that was flushed is lost with the power if its name was not."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
