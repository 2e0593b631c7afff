"""What every test file may rely on: no process group is left over from the file before."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """End a process group that a file's tests left; looked up in sys.modules, so that torch is not imported for it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
