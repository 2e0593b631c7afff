"""The public surface of each package as text, and the rule by which its version must move.

`interface.py` of a package is turned into lines, one per name, parameter and field, and compared with the copy in
tests/contracts/snapshots/gem_<name>.txt:

    something gone or changed, or a new required parameter or field   -> the major version must rise
    something new                                                     -> the minor version must rise
    nothing                                                           -> the version must stay

    python ci/surface.py            check all packages
    python ci/surface.py --update   freeze the present surface, if the version has moved as the rule demands

A changed meaning behind an unchanged signature is not seen here: that is the conformance suites' job (testing.py).
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOTS = ROOT / "tests" / "contracts" / "snapshots"
VERSION = "INTERFACE_VERSION"
REQUIRED = "  [required]"


def interfaces() -> dict[str, Path]:
    """Package name -> its interface.py."""
    return {path.parent.name: path for path in sorted(ROOT.glob("packages/*/gem_*/interface.py"))}


def version_of(source: str) -> tuple[int, int]:
    """The INTERFACE_VERSION that the source assigns."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == VERSION:
            major, minor = ast.literal_eval(node.value)
            return int(major), int(minor)
    raise ValueError(f"no {VERSION} = (major, minor) in the interface")


def surface(source: str) -> list[str]:
    """Sorted lines that describe every public name of an interface module, without its version."""
    lines: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            lines += class_lines(node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            lines += function_lines(node, node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = ast.unparse(target)
            if not name.startswith("_") and name != VERSION:
                value = ast.unparse(node.value) if node.value else ""
                lines.append(f"{name} = {value}")
    return sorted(lines)


def class_lines(node: ast.ClassDef) -> list[str]:
    """A class: its bases and decorators, its fields and its public methods."""
    decorators = " ".join("@" + ast.unparse(d) for d in node.decorator_list)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases}) {decorators}".rstrip()]
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            field = f"{node.name}.{ast.unparse(item.target)}: {ast.unparse(item.annotation)}"
            lines.append(f"{field} = {ast.unparse(item.value)}" if item.value else field + REQUIRED)
        elif isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name == "__call__"):
            lines += function_lines(item, f"{node.name}.{item.name}")
        elif isinstance(item, ast.Assign) and not ast.unparse(item.targets[0]).startswith("_"):
            lines.append(f"{node.name}.{ast.unparse(item)}")
    return lines


def function_lines(node: ast.FunctionDef, name: str) -> list[str]:
    """A function: one line for itself and its result, one for each parameter."""
    decorators = " ".join("@" + ast.unparse(d) for d in node.decorator_list)
    result = ast.unparse(node.returns) if node.returns else "?"
    lines = [f"def {name} -> {result} {decorators}".rstrip()]
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + list(node.args.defaults)
    parameters = [(f"{i}", arg, default) for i, (arg, default) in enumerate(zip(positional, defaults, strict=True))]
    parameters += [
        ("*", arg, default) for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    for place, arg, default in parameters:
        if arg.arg in ("self", "cls"):
            continue
        text = f"def {name} ({place}) {arg.arg}: {ast.unparse(arg.annotation) if arg.annotation else '?'}"
        lines.append(text + (f" = {ast.unparse(default)}" if default else REQUIRED))
    return lines


def breaking_additions(added: set[str], old: list[str]) -> set[str]:
    """New required parameters or fields of something that already existed: callers must change."""
    owners = {line.split(" (")[0].split(" -> ")[0] for line in old} | {line.split("(")[0] for line in old}

    def owner(line: str) -> str:
        return line.split(" (")[0] if line.startswith("def ") else "class " + line.split(".")[0]

    return {line for line in added if line.endswith(REQUIRED) and owner(line) in owners}


def required_move(old: list[str], new: list[str]) -> tuple[str, list[str]]:
    """("major" | "minor" | "none", the lines that say why)."""
    gone, added = set(old) - set(new), set(new) - set(old)
    breaking = gone | breaking_additions(added, old)
    if breaking:
        return "major", [f"- {line}" for line in sorted(gone)] + [f"+ {line}" for line in sorted(added)]
    return ("minor", [f"+ {line}" for line in sorted(added)]) if added else ("none", [])


def verdict(name: str, old: str, source: str) -> str | None:
    """What is wrong with the version of this interface, or None. `old` is the frozen text."""
    first, *old_lines = old.splitlines()
    was = version_of(first)
    now = version_of(source)
    move, why = required_move(old_lines, surface(source))
    if move == "none" and now == was:
        return None
    fits = {"major": now[0] > was[0], "minor": now[0] > was[0] or (now[0] == was[0] and now[1] > was[1]), "none": False}
    if fits[move]:
        return None
    wanted = {
        "major": f"a breaking change needs version ({was[0] + 1}, 0)",
        "minor": f"an addition needs version ({was[0]}, {was[1] + 1})",
        "none": "nothing changed, so the version must stay",
    }[move]
    return "\n".join([f"{name}: {wanted}; frozen {was}, interface.py says {now}.", *why])


def frozen_text(source: str) -> str:
    """The snapshot of an interface."""
    return "\n".join([f"{VERSION} = {version_of(source)}", *surface(source)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="freeze the present surface")
    update = parser.parse_args().update
    problems = []
    for name, path in interfaces().items():
        source, snapshot = path.read_text(), SNAPSHOTS / f"{name}.txt"
        problem = verdict(name, snapshot.read_text(), source) if snapshot.exists() else None
        if problem:
            problems.append(problem)
        elif update:
            SNAPSHOTS.mkdir(parents=True, exist_ok=True)
            snapshot.write_text(frozen_text(source))
        elif not snapshot.exists() or snapshot.read_text() != frozen_text(source):
            problems.append(f"{name}: the frozen surface is out of date; run: python ci/surface.py --update")
    print("\n\n".join(problems) or f"{len(interfaces())} interfaces as frozen")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
