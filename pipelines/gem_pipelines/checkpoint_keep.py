"""Which checkpoints of a run are sound, which is the latest, and which may go.

The latest is derived from sound manifests every time; nothing points to it. Removing goes by soundness, not by names: a
checkpoint counts among the newest `keep` only after its bytes were read back and hashed, so the last good one is never
removed, whatever happened to newer ones. A base of a kept incremental checkpoint is kept with it. Before a directory is
emptied it is renamed out of sight, so that a kill leaves no half checkpoint under its name.

Cost: what was just written is read back once (from the page cache, as a rule), before anything older goes.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from gem_pipelines import failpoints
from gem_pipelines.checkpoint_format import list_steps, step_directory
from gem_pipelines.checkpoint_manifest import Base, Damage, find_damage, manifest_sha256, read_manifest
from gem_pipelines.errors import CheckpointError


def find_all_damage(directory: Path) -> list[Damage]:
    """Every fault of a checkpoint and, where it is incremental, of its base. Empty where it can be loaded."""
    damages = find_damage(directory)
    if damages:
        return damages
    base = read_manifest(directory).base
    if base is None:
        return []
    parent = step_directory(directory.parent, base.step)
    found = [dataclasses.replace(d, file=f"../{parent.name}/{d.file}") for d in find_damage(parent)]
    if not found and manifest_sha256(read_manifest(parent)) != base.sha256:
        found = [Damage(file=f"../{parent.name}", what="is not the checkpoint that this one builds on: other manifest")]
    return found


def find_latest(checkpoints: Path, *, say: Callable[[str], None]) -> int | None:
    """Step of the newest sound checkpoint; None where there is none. `say` hears of every damaged one passed over."""
    for step in reversed(list_steps(checkpoints)):
        damages = find_all_damage(step_directory(checkpoints, step))
        if not damages:
            return step
        shown = "; ".join(str(damage) for damage in damages[:3]) + ("; ..." if len(damages) > 3 else "")
        say(f"CHECKPOINT DAMAGED, passed over: {step_directory(checkpoints, step)}: {shown}")
    return None


def set_aside_damaged(directory: Path) -> None:
    """A run that passed over a damaged checkpoint reaches its step again: keep the damaged one, renamed."""
    if directory.exists() and find_all_damage(directory):
        number = 0
        while (aside := directory.with_name(f"damaged-{directory.name}-{number}")).exists():
            number += 1
        directory.rename(aside)


class Keeper:
    """Removes old checkpoints of one run, and remembers which ones it has found sound."""

    def __init__(self, checkpoints: Path, *, keep: int) -> None:
        self.checkpoints, self.keep = checkpoints, keep
        self._sound: dict[int, Base | None] = {}  # step -> its base: each is read once, not at every sweep

    def sweep(self) -> list[int]:
        """Remove what is older than the newest `keep` sound checkpoints, and what killed writers left.

        Returns the steps that were removed. Raises CheckpointError, having removed nothing, where the newest one does
        not read back as it was written.
        """
        steps = list_steps(self.checkpoints)
        if steps and not self._is_sound(steps[-1]):
            damages = find_all_damage(step_directory(self.checkpoints, steps[-1]))
            raise CheckpointError(
                f"{step_directory(self.checkpoints, steps[-1])} does not read back as it was written, older ones are "
                "kept:\n  " + "\n  ".join(map(str, damages))
            )
        failpoints.reach("before_gc")
        kept: list[int] = []
        doomed: list[int] = []
        for step in reversed(steps):
            if len(kept) >= self.keep:
                doomed.append(step)
            elif self._is_sound(step):
                kept.append(step)
        bases = {base.step for step in kept if (base := self._sound[step]) is not None}
        removed = sorted(set(doomed) - bases)
        for step in removed:
            self._remove(step)
        for leftover in [*self.checkpoints.glob(".tmp-*"), *self.checkpoints.glob(".removed-*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        return removed

    def _is_sound(self, step: int) -> bool:
        directory = step_directory(self.checkpoints, step)
        if step not in self._sound and not find_all_damage(directory):
            self._sound[step] = read_manifest(directory).base
        return step in self._sound

    def _remove(self, step: int) -> None:
        directory = step_directory(self.checkpoints, step)
        out_of_sight = directory.with_name(f".removed-{directory.name}")
        shutil.rmtree(out_of_sight, ignore_errors=True)
        directory.rename(out_of_sight)
        failpoints.reach("during_gc")
        shutil.rmtree(out_of_sight)
        self._sound.pop(step, None)
