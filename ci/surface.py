"""The public surface of each package as text, and the rule by which its version must move.

`interface.py` and `api.py` (`block_api.py` too) of a package are turned into lines, one per name, parameter and field,
and compared with the copy in tests/contracts/snapshots/gem_<name>.txt:

    something gone or changed, or a new required parameter or field     -> the major version must rise
    something new that implementations of a Protocol have to provide    -> the major version must rise
    something else that is new                                          -> the minor version must rise
    nothing                                                             -> the version must stay

An implementation needs no base class, so whatever is new in a Protocol, a method with a body or a parameter with a
default too, is missing in all that were written before. Of a class with abstract methods it is these alone; the others
are inherited. (gem_embeddings 1.1 to 1.4 were made before this rule: their new methods raised the minor number.)

    python ci/surface.py               check all packages
    python ci/surface.py --update      freeze the present surface, if the version has moved as the rule demands
    python ci/surface.py --anew NAME   freeze without comparing: where the form of these files changes, and nothing else

A changed meaning behind an unchanged signature is not seen here: that is the conformance suites' job (testing.py).
Names that api.py hands on from other modules of its package (`__all__`) are followed to where they are defined.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOTS = ROOT / "tests" / "contracts" / "snapshots"
VERSION = "INTERFACE_VERSION"
REQUIRED = "  [required]"
FIRST = (1, 0)
Function = ast.FunctionDef | ast.AsyncFunctionDef
_NOBODY_CALLS = ("__post_init__", "__slots__", "__all__")


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
    """The present surface of the package of this interface.py."""
    lines = surface(interface.read_text(), interface.parent)
    for path in sorted(interface.parent.glob("*api.py")):
        lines += surface(path.read_text(), interface.parent, prefix=f"{path.stem}.")
    return Surface(version=version_of(interface.read_text()), lines=tuple(sorted(lines)))


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


# ------------------------------------------------------------------------------------------------ lines of a module


def surface(source: str, package: Path | None = None, *, prefix: str = "") -> list[str]:
    """Sorted lines that describe every public name of a module, without its version.

    package: directory of the modules that names are imported from; prefix: goes before every name.
    """
    tree = ast.parse(source)
    exported = exports(tree)
    lines: list[str] = []
    for node in statements(tree.body):
        lines += [line for name, line in described(node, prefix) if is_public(name) and name != VERSION]
    for name in sorted((exported or set()) - defined(tree)):
        if package is None:
            raise ValueError(f"__all__ names {name!r}, which the module does not define")
        lines += imported_lines(tree, name, package, prefix)
    if exported is None:
        return sorted(lines)
    return sorted(line for line in lines if top_name(line, prefix) in exported)


def statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements of a module or class, those under conditions too."""
    for node in body:
        if isinstance(node, ast.If):
            yield from statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from statements(
                [*node.body, *node.orelse, *node.finalbody, *(s for h in node.handlers for s in h.body)]
            )
        else:
            yield node


def described(node: ast.stmt, prefix: str) -> list[tuple[str, str]]:
    """(top name, line) of what a statement defines."""
    if isinstance(node, ast.ClassDef):
        return [(node.name, line) for line in class_lines(node, prefix)]
    if isinstance(node, Function):
        return [(node.name, line) for line in function_lines(node, prefix + node.name)]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        choices = choices_of(node.value) if prefix else ()
        if choices:
            return [(name, f"{prefix}{name} has {choice!r}") for choice in choices]
        return [(name, f"{prefix}{name} = {ast.unparse(node.value) if node.value else ''}")]
    return []


def choices_of(value: ast.expr | None) -> tuple[str, ...]:
    """The words of ("a", "b") or Literal["a", "b"]: what a caller may say, so that one more of api.py is an addition.

    In interface.py it is a change: there it may be what implementations are asked for.
    """
    if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal":
        value = value.slice
    words = [e.value for e in getattr(value, "elts", ()) if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return tuple(words) if words and len(words) == len(value.elts) else ()  # type: ignore[union-attr]


def exports(tree: ast.Module) -> set[str] | None:
    """The names of `__all__`; None where the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def defined(tree: ast.Module) -> set[str]:
    """Top names that the module itself defines."""
    return {name for node in statements(tree.body) for name, _ in described(node, "")}


def imported_lines(tree: ast.Module, name: str, package: Path, prefix: str) -> list[str]:
    """The lines of a name that a module hands on, as the module that defines it has them."""
    for node in statements(tree.body):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            module = node.module.removeprefix(f"{package.name}.")
            path = package / f"{module}.py"
            if module == "interface" or not path.exists():
                return [f"{prefix}{name} = {node.module}.{alias.name}"]
            source = ast.parse(path.read_text())
            if alias.name not in defined(source):
                return imported_lines(source, alias.name, package, prefix)
            if alias.asname:
                raise ValueError(f"__all__ names {name!r}, which is {alias.name!r} of {path.name}: keep its name")
            return [line for n in statements(source.body) for top, line in described(n, prefix) if top == name]
    raise ValueError(f"__all__ names {name!r}, which the module neither defines nor imports")


def is_public(name: str) -> bool:
    """Whether callers may use a name: no leading underscore, or one that Python itself calls."""
    dunder = name.startswith("__") and name.endswith("__")
    return (dunder or not name.startswith("_")) and name not in _NOBODY_CALLS


def class_lines(node: ast.ClassDef, prefix: str = "") -> list[str]:
    """A class: its bases and decorators, its fields and its public methods. Fields given by place have their place."""
    name, place = prefix + node.name, 0
    decorators = " ".join("@" + ast.unparse(d) for d in node.decorator_list)
    bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
    lines = [f"class {name}({bases}) {decorators}".rstrip()]
    by_place = is_by_place(node)
    for item in statements(node.body):
        if isinstance(item, ast.AnnAssign):
            field, annotation = ast.unparse(item.target), ast.unparse(item.annotation)
            if annotation.endswith("KW_ONLY"):
                by_place = False
                continue
            value = ast.unparse(item.value) if item.value else None
            counted = by_place and "ClassVar" not in annotation and "kw_only=True" not in (value or "")
            where = f" ({place})" if counted else ""
            place += counted
            if is_public(field):
                lines.append(f"{name}.{field}{where}: {annotation}" + (REQUIRED if value is None else f" = {value}"))
        elif isinstance(item, Function) and is_public(item.name):
            lines += function_lines(item, f"{name}.{item.name}")
        elif isinstance(item, ast.ClassDef) and is_public(item.name):
            lines += class_lines(item, f"{name}.")
        elif isinstance(item, ast.Assign) and is_public(ast.unparse(item.targets[0])):
            lines.append(f"{name}.{ast.unparse(item)}")
    return lines


def is_by_place(node: ast.ClassDef) -> bool:
    """Whether the class is built from its fields in their order."""
    decorators = [ast.unparse(d) for d in node.decorator_list]
    dataclasses = [d for d in decorators if re.match(r"(dataclasses\.)?dataclass\b", d)]
    named = any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)
    return named or any("kw_only=True" not in d for d in dataclasses)


def function_lines(node: Function, name: str) -> list[str]:
    """A function: one line for itself and its result, one for each parameter."""
    decorators = " ".join("@" + ast.unparse(d) for d in node.decorator_list)
    result = ast.unparse(node.returns) if node.returns else "?"
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    lines = [f"{kind} {name} -> {result} {decorators}".rstrip()]
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
    only = len(node.args.posonlyargs)
    parameters = [
        (f"{i}/" if i < only else f"{i}", arg, default)
        for i, (arg, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    parameters += [
        ("*", arg, default) for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    for place, arg, default in parameters:
        if arg.arg not in ("self", "cls"):
            text = f"def {name} ({place}) {arg.arg}: {annotated(arg)}"
            lines.append(text + (f" = {ast.unparse(default)}" if default else REQUIRED))
    for stars, arg in (("*", node.args.vararg), ("**", node.args.kwarg)):
        if arg is not None:
            lines.append(f"def {name} (any) {stars}{arg.arg}: {annotated(arg)}")
    return lines


def annotated(arg: ast.arg) -> str:
    return ast.unparse(arg.annotation) if arg.annotation else "?"


# ------------------------------------------------------------------------------------------------ the rule


def path_of(line: str) -> str:
    """The dotted name that a line is about, without parameters."""
    found = re.match(r"(?:async )?(?:def |class )?([\w.]+)", line)
    assert found is not None, line
    return found[1]


def top_name(line: str, prefix: str) -> str:
    return path_of(line).removeprefix(prefix).partition(".")[0]


def is_parameter(line: str) -> bool:
    return line.startswith("def ") and path_of(line) + " (" in line


def breaking_additions(added: set[str], old: Sequence[str], new: Sequence[str]) -> set[str]:
    """What is new in something that already existed, and that callers must give or implementations provide."""
    heads = {path_of(line) for line in old if line.startswith(("def ", "async def ")) and not is_parameter(line)}
    classes = {path_of(line): line for line in old if line.startswith("class ")}
    protocols = {name for name, line in classes.items() if re.search(r"[(, .]Protocol\b", line)}
    abstract = {path_of(line) for line in new if re.search(r"@(abc\.)?abstractmethod\b", line)}

    def owner(line: str) -> str:
        return path_of(line) if is_parameter(line) else path_of(line).rpartition(".")[0]

    def is_breaking(line: str) -> bool:
        member_of = path_of(line).rpartition(".")[0]
        given = line.endswith(REQUIRED) and (owner(line) in heads or owner(line) in classes)
        provided = member_of in protocols or (member_of in classes and path_of(line) in abstract)
        return given or provided

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
        now, snapshot = read_surface(path), snapshots / f"{name}.txt"
        problem = None
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
