"""The public names of a module as lines of text, for ci/surface.py, which says what the lines are for.

A line must change when what a caller or an implementation sees changes. So a name that a signature refers to and that
has no line of its own (a private constant as a default, an alias, a base class) is written out where it is used:
renaming it is no change, and changing its value is one. A public class is not: it must be listed (`Classes.unlisted`),
so that somebody decides whether it is promised. What `__init__` sets, `self.<name>`, is part of a class.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

VERSION = "INTERFACE_VERSION"
REQUIRED = "  [required]"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_NOBODY_CALLS = ("__post_init__", "__slots__", "__all__")


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Classes of a package as "module.name": those that have lines, and public ones that lines refer to, with one of
    the files that do. A class may have its lines from another module than the one that refers to it.
    """

    told: set[str] = field(default_factory=set)
    referred: dict[str, str] = field(default_factory=dict)

    def unlisted(self) -> dict[str, str]:
        """Those that users get in their hands and whose change nothing would tell."""
        return {name: by for name, by in sorted(self.referred.items()) if name not in self.told}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Where a line's names are looked up: a module, and which names have lines of their own.

    prefix   goes before every name; "" = interface.py
    module   name of the module that the tree is of
    told     names with lines of their own. What else a signature refers to is written out in it
    classes  see Classes
    left_out "Class.method" that are not promised
    extra    lines of what cannot be written out: words of a Literal, private classes
    """

    tree: ast.Module
    package: Path | None
    prefix: str
    module: str
    told: Callable[[str], bool]
    classes: Classes
    left_out: Collection[str] = ()
    extra: set[str] = field(default_factory=set)

    def inside(self, path: Path) -> Scope:
        """The same in another module."""
        return replace(self, tree=parsed(path.read_text()), module=path.stem)

    def find(self, name: str) -> tuple[ast.stmt, Scope] | None:
        """The statement of this package that defines a name, and its module."""
        for node in statements(self.tree.body):
            if name in names_of(node):
                return node, self
            for path, alias in imports_of(node, self.package):
                if (alias.asname or alias.name) == name:
                    if path.stem == "interface" and is_public(name):
                        return None  # told by interface.py
                    return self.inside(path).find(alias.name)
        return None

    def written(self, node: ast.expr) -> str:
        """An annotation, default or base as text, with what it refers to written out where that has no line."""
        return ast.unparse(Written(self).visit(copy.deepcopy(node)))


class Written(ast.NodeTransformer):
    """Replaces names of constants and aliases that have no line of their own by their values."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = None if self.scope.told(node.id) else self.scope.find(node.id)
        if found is None:
            return node
        definition, scope = found
        if isinstance(definition, ast.ClassDef) and is_public(node.id):
            self.scope.classes.referred[f"{scope.module}.{definition.name}"] = f"{self.scope.module}.py"
        elif isinstance(definition, ast.ClassDef):
            told = scope.told
            inside = replace(scope, told=lambda name: name == node.id or told(name))
            self.scope.extra.update(class_lines(definition, inside))
        value = definition.value if isinstance(definition, ast.Assign | ast.AnnAssign) else None
        words = choices_of(value) if self.scope.prefix and value is not None else ()
        if words:  # one more is an addition, as with those that have lines
            self.scope.extra.update(f"{self.scope.prefix}{node.id} has {word!r}" for word in words)
        if value is None or words or node.id in names_in(value):
            return node
        return Written(scope).visit(copy.deepcopy(value))


@cache
def parsed(source: str) -> ast.Module:
    """Nobody may change it: a module is looked into for each name that it is asked for."""
    return ast.parse(source)


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def imports_of(node: ast.stmt, package: Path | None) -> list[tuple[Path, ast.alias]]:
    """(module of this package, name) that a statement imports."""
    if package is None or not isinstance(node, ast.ImportFrom) or not node.module:
        return []
    path = package / f"{node.module.removeprefix(f'{package.name}.')}.py"
    return [(path, alias) for alias in node.names] if path.exists() else []


def surface(
    source: str,
    package: Path | None = None,
    *,
    prefix: str = "",
    only: Collection[str] | None = None,
    classes: Classes | None = None,
) -> list[str]:
    """Sorted lines that describe every public name of a module, without its version.

    package: directory of the modules that names are imported from; prefix: goes before every name. only: these names
    instead of those of `__all__`, or, without one, of all that are defined here or imported as themselves (`x as x`);
    without the method of "-Class.method".
    classes: notes those that the lines tell and refer to.
    """
    tree = parsed(source)
    exported = exports(tree) if only is None else {name for name in only if not name.startswith("-")}
    if exported is None:
        exported = {name for name in defined(tree) | handed_on(tree) if is_public(name)}
    scope = Scope(
        tree=tree,
        package=package,
        prefix=prefix,
        module=prefix.removesuffix(".") or "interface",
        told=exported.__contains__,
        classes=classes or Classes(),
        left_out=[name.removeprefix("-") for name in only or () if name.startswith("-")],
    )
    absent = set(scope.left_out) - methods_of(tree)
    if absent:
        raise ValueError(f"{prefix}{', '.join(sorted(absent))}: left out, and not defined there")
    lines: list[str] = []
    for node in statements(tree.body):
        if exported.intersection(names_of(node)) - {VERSION}:
            lines += described(node, scope)
    for name in sorted(exported - defined(tree)):
        if package is None and name not in handed_on(tree):
            raise ValueError(f"__all__ names {name!r}, which the module does not define")
        lines += imported_lines(name, scope)
    return sorted({*lines, *scope.extra})


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


def names_of(node: ast.stmt) -> list[str]:
    """The name that a statement defines."""
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)]
    return []


def described(node: ast.stmt, scope: Scope) -> list[str]:
    """The lines of what a statement defines."""
    if isinstance(node, ast.ClassDef):
        return class_lines(node, scope)
    if isinstance(node, Function):
        return function_lines(node, scope.prefix + node.name, scope)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        (name,) = names_of(node)
        choices = choices_of(node.value) if scope.prefix else ()
        if choices:
            return [f"{scope.prefix}{name} has {choice!r}" for choice in choices]
        value = scope.written(node.value) if node.value else ""
        if scope.prefix == "testing." and not isinstance(node.value, ast.Subscript):
            value = "..."  # what a suite tries may change; an alias of a type is asked for
        return [f"{scope.prefix}{name} = {value}"]
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
    return {name for node in statements(tree.body) for name in names_of(node)}


def methods_of(tree: ast.Module) -> set[str]:
    """ "Class.method" of the classes that the module itself defines."""
    classes = [node for node in statements(tree.body) if isinstance(node, ast.ClassDef)]
    return {
        f"{node.name}.{item.name}" for node in classes for item in statements(node.body) if isinstance(item, Function)
    }


def handed_on(tree: ast.Module) -> set[str]:
    """Names that a module imports as themselves, `from .. import x as x`, which says that they are for others."""
    found = [alias for node in statements(tree.body) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.name for alias in found if alias.asname == alias.name}


def imported_lines(name: str, scope: Scope) -> list[str]:
    """The lines of a name that a module hands on, as the module that defines it has them."""
    for node in statements(scope.tree.body):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            found = imports_of(node, scope.package)
            if not found or found[0][0].stem == "interface":
                return [f"{scope.prefix}{name} = {node.module}.{alias.name}"]
            inside = scope.inside(found[0][0])
            if alias.name not in defined(inside.tree):
                return imported_lines(alias.name, inside)
            if alias.asname not in (None, name) or alias.name != name:
                raise ValueError(f"{name!r} is {alias.name!r} of {found[0][0].name}: keep its name")
            return [line for n in statements(inside.tree.body) if name in names_of(n) for line in described(n, inside)]
    raise ValueError(f"{scope.prefix}{name}: promised, and neither defined nor imported there")


def is_public(name: str) -> bool:
    """Whether callers may use a name: no leading underscore, or one that Python itself calls."""
    dunder = name.startswith("__") and name.endswith("__")
    return (dunder or not name.startswith("_")) and name not in _NOBODY_CALLS


def members_of(node: ast.ClassDef, scope: Scope) -> tuple[list[ast.expr], list[tuple[ast.stmt, Scope]]]:
    """Bases and members of a class, each with its module, those of bases without lines of their own among them."""
    bases: list[ast.expr] = []
    inherited: list[tuple[ast.stmt, Scope]] = []
    for base in node.bases:
        found = None if not isinstance(base, ast.Name) or scope.told(base.id) else scope.find(base.id)
        if found is None or not isinstance(found[0], ast.ClassDef):
            bases.append(base)
            continue
        above, members = members_of(found[0], found[1])
        bases += [one for one in above if ast.unparse(one) not in map(ast.unparse, [*bases, *node.bases])]
        inherited += members
    own = list(statements(node.body))
    mine = {name for item in own for name in names_of(item)}
    kept = [(item, where) for item, where in inherited if not mine.intersection(names_of(item))]
    return bases, kept + [(item, scope) for item in own]


def class_lines(node: ast.ClassDef, scope: Scope, outer: str = "") -> list[str]:
    """A class: its bases and decorators, its fields and its public methods. Fields given by place have their place."""
    name, place = (outer or scope.prefix) + node.name, 0
    decorators = " ".join("@" + ast.unparse(d) for d in node.decorator_list)
    above, members = members_of(node, scope)
    bases = ", ".join(ast.unparse(base) for base in [*above, *node.keywords])
    lines = [f"class {name}({bases}) {decorators}".rstrip()]
    scope.classes.told.update([] if outer else [f"{scope.module}.{node.name}"])
    by_place = is_by_place(node)
    for item, where in members:
        if isinstance(item, ast.AnnAssign):
            field, annotation = ast.unparse(item.target), ast.unparse(item.annotation)
            if annotation.endswith("KW_ONLY"):
                by_place = False
                continue
            value = ast.unparse(item.value) if item.value else None
            counted = by_place and "ClassVar" not in annotation and "kw_only=True" not in (value or "")
            at = f" ({place})" if counted else ""
            place += counted
            if is_public(field):
                given = f" = {where.written(item.value)}" if item.value else REQUIRED
                lines.append(f"{name}.{field}{at}: {where.written(item.annotation)}{given}")
        elif isinstance(item, Function) and is_public(item.name) and f"{node.name}.{item.name}" not in scope.left_out:
            lines += function_lines(item, f"{name}.{item.name}", where)
        elif isinstance(item, ast.ClassDef) and is_public(item.name):
            lines += class_lines(item, where, f"{name}.")
        elif isinstance(item, ast.Assign) and is_public(ast.unparse(item.targets[0])):
            lines.append(f"{name}.{ast.unparse(item.targets[0])} = {where.written(item.value)}")
    told = {named for item, _ in members for named in names_of(item)}
    lines += [
        f"{name}.{attribute}: {of}" for attribute, of in attributes_of(node, scope).items() if attribute not in told
    ]
    return lines


def attributes_of(node: ast.ClassDef, scope: Scope) -> dict[str, str]:
    """Public `self.<name>` that `__init__` sets -> its type as far as it is written, "?" otherwise. With those of bases
    without lines of their own, whose `__init__` is called by that of the class.
    """
    found: dict[str, str] = {}
    for base in node.bases:
        above = None if not isinstance(base, ast.Name) or scope.told(base.id) else scope.find(base.id)
        if above is not None and isinstance(above[0], ast.ClassDef):
            found |= attributes_of(above[0], above[1])
    for init in statements(node.body):
        if isinstance(init, Function) and init.name == "__init__":
            found |= set_in(init, scope)
    return found


def set_in(init: Function, scope: Scope) -> dict[str, str]:
    """`attributes_of` for one `__init__`. An argument that is kept as it came has the parameter's type."""
    own, *places = [*init.args.posonlyargs, *init.args.args]
    given = {arg.arg: arg.annotation for arg in [*places, *init.args.kwonlyargs]}
    names: list[str] = []
    types: dict[str, ast.expr | None] = {}
    for part in ast.walk(init):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == own.arg:
            names.append(part.attr)
        elif isinstance(part, ast.AnnAssign):
            types[ast.unparse(part.target)] = part.annotation
        elif isinstance(part, ast.Assign) and isinstance(part.value, ast.Name):
            types[ast.unparse(part.targets[0])] = given.get(part.value.id)
    told = {name: types.get(f"{own.arg}.{name}") for name in names if is_public(name)}
    return {name: scope.written(of) if of else "?" for name, of in told.items()}


def is_by_place(node: ast.ClassDef) -> bool:
    """Whether the class is built from its fields in their order."""
    decorators = [ast.unparse(d) for d in node.decorator_list]
    dataclasses = [d for d in decorators if re.match(r"(dataclasses\.)?dataclass\b", d)]
    named = any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)
    return named or any("kw_only=True" not in d for d in dataclasses)


def function_lines(node: Function, name: str, scope: Scope) -> list[str]:
    """A function: one line for itself and its result, one for each parameter."""
    decorators = " ".join("@" + ast.unparse(d) for d in node.decorator_list)
    result = scope.written(node.returns) if node.returns else "?"
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
            text = f"def {name} ({place}) {arg.arg}: {annotated(arg, scope)}"
            lines.append(text + (f" = {scope.written(default)}" if default else REQUIRED))
    for stars, arg in (("*", node.args.vararg), ("**", node.args.kwarg)):
        if arg is not None:
            lines.append(f"def {name} (any) {stars}{arg.arg}: {annotated(arg, scope)}")
    return lines


def annotated(arg: ast.arg, scope: Scope) -> str:
    return scope.written(arg.annotation) if arg.annotation else "?"
