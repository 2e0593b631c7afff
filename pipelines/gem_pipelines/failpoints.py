"""Named places where a test may interrupt: the writer of checkpoints and the steps around it.

    reach("half_shard")      in the code: nothing happens unless a hook is installed
    install(hook)            in a test's own process: hook(name) may kill the process, raise, or wait; install(None)

There is no switch from outside (no environment variable, no config key): a run cannot be told to die.

Cost: one comparison where a place is reached, which is a few times per checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

WRITER = (
    "after_shard_open",
    "half_shard",
    "before_fsync",
    "before_manifest",
    "before_rename",
    "before_dir_fsync",
    "before_gc",
    "during_gc",
)
EVERY_RANK = ("before_snapshot", "after_snapshot", "after_save")
NAMES = (*WRITER, *EVERY_RANK)

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every place that this process reaches from now on."""
    global _hook
    _hook = hook


def reach(name: str) -> None:
    """This process is at the place `name`."""
    if _hook is not None:
        assert name in NAMES, f"{name} is not in failpoints.NAMES"
        _hook(name)
