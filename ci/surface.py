"""The public surface of each package as text, and the rule by which its version must move.

`interface.py` and `api.py` (`block_api.py` too) of a package, and the names of other modules that ci/surface.toml
lists, are turned into lines, one per name, parameter and field (surface_lines.py), and compared with the copy in
tests/contracts/snapshots/gem_<name>.txt:

    something gone or changed, or a new required parameter or field     -> the major version must rise
    something new that implementations have to provide or to obey       -> the major version must rise
    something else that is new                                          -> the minor version must rise
    nothing                                                             -> the version must stay

Provide: an implementation needs no base class, so whatever is new in a Protocol, a method with a body or a parameter
with a default too, is missing in all that were written before. Of a class with abstract methods it is these alone; the
others are inherited.

Obey: a new field of a dataclass that implementations are handed: one that is a parameter of a method that they provide,
or of what builds them (testing.py's LoaderFactory takes a LoaderConfig), or that such a dataclass holds in a field.
Whoever wrote an implementation before does not know the field and would drop it in silence.

(gem_data 1.1 to 1.7 and gem_embeddings 1.1 to 1.4 were made before these rules: their new fields and methods raised the
minor number.)

    python ci/surface.py               check all packages
    python ci/surface.py --update      freeze the present surface, if the version has moved as the rule demands
    python ci/surface.py --anew NAME   freeze without comparing: where the form of these files changes, and nothing else

A changed meaning behind an unchanged signature is not seen here: that is the conformance suites' job (testing.py).
Names that a module hands on from others of its package (`__all__`, or `import x as x`) are followed to where they are
defined. Of constants of testing.py the name is frozen, not the value: suites may try more.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surface_lines import REQUIRED, VERSION, Classes, surface

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOTS = ROOT / "tests" / "contracts" / "snapshots"
FIRST = (1, 0)


@dataclass(frozen=True, kw_only=True)
class Surface:
    """A package's version and the sorted lines of its public names."""

    version: tuple[int, int]
    lines: tuple[str, ...]

    def text(self) -> str:
        """As it is frozen."""
        return "\n".join([f"{VERSION} = {self.version}", *self.lines]) + "\n"


def interfaces(root: Path = ROOT) -> dict[str, Path]:
    """Package name -> its interface.py."""
    return {path.parent.name: path for path in sorted(root.glob("packages/*/gem_*/interface.py"))}


def read_surface(interface: Path) -> Surface:
    """The present surface of the package of this interface.py.

    Raises ValueError where a promised name is not there, or a public class that a signature refers to has no lines.
    """
    package, classes = interface.parent, Classes()
    lines = surface(interface.read_text(), package, classes=classes)
    for path in sorted(package.glob("*api.py")):
        lines += surface(path.read_text(), package, prefix=f"{path.stem}.", classes=classes)
    for module, names in promised(package).items():
        source = (package / f"{module}.py").read_text()
        lines += surface(source, package, prefix=f"{module}.", only=names, classes=classes)
    unlisted = [f"{name} (in {by})" for name, by in classes.unlisted().items()]
    if unlisted:
        raise ValueError(
            "promised signatures refer to classes that are not promised, so that no change of these would be seen: "
            f"{', '.join(unlisted)}; list them in ci/surface.toml, or begin their names with an underscore"
        )
    return Surface(version=version_of(interface.read_text()), lines=tuple(sorted(lines)))


def promised(package: Path) -> dict[str, list[str]]:
    """Module -> names that a package promises outside interface.py and *api.py: its part of surface.toml."""
    path = package.parents[2] / "ci" / "surface.toml"
    listed = tomllib.loads(path.read_text()) if path.exists() else {}
    return dict(listed.get(package.name, {}))


def frozen_surface(text: str) -> Surface:
    """Inverse of `Surface.text`."""
    first, *lines = text.splitlines()
    return Surface(version=version_of(first), lines=tuple(lines))


def version_of(source: str) -> tuple[int, int]:
    """The INTERFACE_VERSION that the source assigns."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == VERSION:
            major, minor = ast.literal_eval(node.value)
            return int(major), int(minor)
    raise ValueError(f"no {VERSION} = (major, minor) in the interface")


# ------------------------------------------------------------------------------------------------ the rule


def path_of(line: str) -> str:
    """The dotted name that a line is about, without parameters."""
    found = re.match(r"(?:async )?(?:def |class )?([\w.]+)", line)
    assert found is not None, line
    return found[1]


def is_parameter(line: str) -> bool:
    return line.startswith("def ") and path_of(line) + " (" in line


def handed(old: Sequence[str], classes: Mapping[str, str], asked: Callable[[str], bool]) -> set[str]:
    """Dataclasses that implementations are handed: in parameters of what they provide (`asked`: of these methods) or
    of what builds them (a Callable alias of testing.py), and, through their fields, what these hold.
    """
    fields: dict[str, str] = {}
    words: set[str] = set()
    for line in old:
        owner = path_of(line).rpartition(".")[0]
        if is_parameter(line) and asked(path_of(line)):
            words.update(re.findall(r"\w+", line.partition(": ")[2]))
        elif line.startswith("testing.") and " = Callable[[" in line:
            words.update(re.findall(r"\w+", line.partition("[[")[2].rpartition("],")[0]))
        elif owner in classes and is_field(line):
            fields[owner] = fields.get(owner, "") + " " + line.partition(": ")[2]
    found: set[str] = set()
    while True:
        more = {name for name in fields if name.rpartition(".")[2] in words and "dataclass" in classes[name]} - found
        if not more:
            return found
        found |= more
        words.update(word for name in more for word in re.findall(r"\w+", fields[name]))


def is_field(line: str) -> bool:
    return re.match(r"[\w.]+\.\w+( \(\d+\))?: ", line) is not None


def breaking_additions(added: set[str], old: Sequence[str], new: Sequence[str]) -> set[str]:
    """What is new in something that already existed, and that callers must give or implementations provide."""
    heads = {path_of(line) for line in old if line.startswith(("def ", "async def ")) and not is_parameter(line)}
    classes = {path_of(line): line for line in old if line.startswith("class ")}
    protocols = {name for name, line in classes.items() if re.search(r"[(, .]Protocol\b", line)}
    abstract = {path_of(line) for line in new if re.search(r"@(abc\.)?abstractmethod\b", line)}

    def owner(line: str) -> str:
        return path_of(line) if is_parameter(line) else path_of(line).rpartition(".")[0]

    def asked(method: str) -> bool:
        return method.rpartition(".")[0] in protocols or method in abstract

    obeyed = handed(old, classes, asked)

    def is_breaking(line: str) -> bool:
        member_of = path_of(line).rpartition(".")[0]
        given = line.endswith(REQUIRED) and (owner(line) in heads or owner(line) in classes)
        provided = member_of in protocols or (member_of in classes and path_of(line) in abstract)
        return given or provided or (member_of in obeyed and is_field(line))

    return {line for line in added if is_breaking(line)}


def required_move(old: Sequence[str], new: Sequence[str]) -> tuple[str, list[str]]:
    """("major" | "minor" | "none", the lines that say why)."""
    gone, added = set(old) - set(new), set(new) - set(old)
    if gone or breaking_additions(added, old, new):
        return "major", [f"- {line}" for line in sorted(gone)] + [f"+ {line}" for line in sorted(added)]
    return ("minor", [f"+ {line}" for line in sorted(added)]) if added else ("none", [])


def verdict(name: str, frozen: Surface, now: Surface) -> str | None:
    """What is wrong with the version of this package, or None."""
    move, why = required_move(frozen.lines, now.lines)
    was, is_now = frozen.version, now.version
    if move == "none" and is_now == was:
        return None
    higher_major = is_now[0] > was[0]
    fits = {"major": higher_major, "minor": higher_major or (is_now[0] == was[0] and is_now[1] > was[1]), "none": False}
    if fits[move]:
        return None
    wanted = {
        "major": f"a breaking change needs version ({was[0] + 1}, 0)",
        "minor": f"an addition needs version ({was[0]}, {was[1] + 1})",
        "none": "nothing changed, so the version must stay",
    }[move]
    return "\n".join([f"{name}: {wanted}; frozen {was}, interface.py says {is_now}.", *why])


# ------------------------------------------------------------------------------------------------ the command


def was_frozen(snapshot: Path) -> bool:
    """Whether version control knows a snapshot of this name, now or earlier. False without version control."""
    command = ["git", "log", "-1", "--format=%h", "--", str(snapshot)]
    done = subprocess.run(command, cwd=snapshot.parent.parent, capture_output=True, text=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


def missing(name: str, snapshot: Path, now: Surface) -> str | None:
    """Why a package without a snapshot may not simply be frozen; None for a new one."""
    if now.version == FIRST and not was_frozen(snapshot):
        return None
    return (
        f"{name}: no frozen surface to compare version {now.version} with. Put {snapshot.name} back "
        f"(git checkout -- {snapshot}), or freeze without comparing: python ci/surface.py --anew {name}"
    )


def check(root: Path, snapshots: Path, *, update: bool, anew: Sequence[str]) -> list[str]:
    """What is wrong, one entry a package; writes the snapshots of the others if `update`, of `anew` in any case."""
    found, problems = interfaces(root), []
    problems += [f"{name}: no such package; there are {', '.join(found)}" for name in anew if name not in found]
    for path in sorted(snapshots.glob("*.txt")):
        if path.stem not in found:
            problems.append(f"{path.stem}: frozen, but there is no such package any more; remove {path}")
    for name, path in found.items():
        try:
            now = read_surface(path)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        snapshot, problem = snapshots / f"{name}.txt", None
        if name not in anew:
            frozen = snapshot.read_text() if snapshot.exists() else None
            problem = verdict(name, frozen_surface(frozen), now) if frozen else missing(name, snapshot, now)
            if not problem and not update and frozen != now.text():
                problem = f"{name}: the frozen surface is out of date; run: python ci/surface.py --update"
        if problem:
            problems.append(problem)
        elif update or name in anew:
            snapshots.mkdir(parents=True, exist_ok=True)
            snapshot.write_text(now.text())
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="freeze the present surface")
    parser.add_argument("--anew", nargs="+", default=[], metavar="NAME", help="freeze these without comparing")
    arguments = parser.parse_args()
    problems = check(ROOT, SNAPSHOTS, update=arguments.update, anew=arguments.anew)
    print("\n\n".join(problems) or f"{len(interfaces())} interfaces as frozen")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
