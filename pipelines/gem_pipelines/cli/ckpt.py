"""gemline ckpt inspect | verify | export"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gem_pipelines.checkpoint_format import list_steps, step_directory
from gem_pipelines.checkpoint_keep import find_all_damage
from gem_pipelines.checkpoint_manifest import MANIFEST, read_manifest, state_digest
from gem_pipelines.cli.parser import Parser
from gem_pipelines.errors import CheckpointError, ConfigError


def main(arguments: Sequence[str]) -> int:
    """Inspect or verify one checkpoint, or all checkpoints of a run; export one, or the newest sound one."""
    parser = Parser(
        prog="gemline ckpt",
        description="inspect: what a checkpoint holds, as JSON. verify: check every byte; exit code 1 where one "
        "is damaged. export: write the newest sound one as safetensors (dense part) and Parquet (tables) into OUT.\n"
        "DIR is a checkpoint, or a run (or its checkpoints directory): then all of its checkpoints.",
    )
    parser.add_argument("verb", choices=["inspect", "verify", "export"])
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("out", metavar="OUT", nargs="?", help="directory that export makes")
    known = parser.parse_args(arguments)
    if known.verb == "export" and known.out is None:
        raise ConfigError(f"export needs a directory to make: gemline ckpt export {known.directory} OUT")
    if known.verb != "export" and known.out is not None:
        raise ConfigError(f"gemline ckpt {known.verb} takes one directory, came also {known.out!r}")
    directories = checkpoint_directories(Path(known.directory))
    if known.verb == "export":
        return export_newest(directories, Path(known.out))
    return inspect(directories) if known.verb == "inspect" else verify(directories)


def checkpoint_directories(path: Path) -> list[Path]:
    """The checkpoints that `path` stands for."""
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return [path]
    for parent in (path / "checkpoints", path):
        found = [step_directory(parent, step) for step in list_steps(parent)]
        if found:
            return found
    raise CheckpointError(f"{path} holds no checkpoint (a directory step-NNNNNNNN with {MANIFEST})")


def inspect(directories: list[Path]) -> int:
    """Print the manifests' content without block hashes."""
    shown = []
    for directory in directories:
        manifest = read_manifest(directory)
        shown.append(
            {
                "directory": str(directory),
                "state_digest": state_digest(manifest),
                "format_version": list(manifest.format_version),
                "base": None if manifest.base is None else manifest.base.step,
                "bytes": sum(entry.bytes for entry in manifest.files),
                "files": {entry.name: entry.bytes for entry in manifest.files},
                "tensors": {key: f"{entry.dtype} {list(entry.shape)}" for key, entry in manifest.tensors.items()},
                "about": manifest.about,
            }
        )
    print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    return 0


def export_newest(directories: list[Path], out: Path) -> int:
    """Export the newest one of `directories` that is sound."""
    from gem_pipelines.checkpoint_export import export

    for directory in reversed(directories):
        damages = find_all_damage(directory)
        if not damages:
            export(directory, out)
            print(f"{directory} exported to {out}")
            return 0
        print(f"{directory}: DAMAGED, passed over: {damages[0]}")
    raise CheckpointError(f"none of the {len(directories)} checkpoints is sound; gemline ckpt verify says more")


def verify(directories: list[Path]) -> int:
    """Check every byte; name file and byte range of what is damaged."""
    bad = 0
    for directory in directories:
        damages = find_all_damage(directory)
        print(f"{directory}: {'DAMAGED' if damages else 'sound'}")
        for damage in damages:
            print(f"  {damage}")
        bad += bool(damages)
    return 1 if bad else 0
