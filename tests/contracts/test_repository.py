"""Rules about the tree itself: sizes, machine paths, what may not be loaded."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked(*suffixes: str) -> list[Path]:
    """Files under version control, or all files of the tree where git is not at hand."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    paths = [ROOT / name for name in names if name.endswith(suffixes)]
    return [path for path in paths if path.is_file()]


def is_kernel(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def is_operator(node: ast.AST) -> bool:
    """An operator of torch.library: its schema is flat, so its arguments cannot be grouped."""
    return any("custom_op" in ast.unparse(d) or "register_fake" in ast.unparse(d) for d in node.decorator_list)


def test_sizes():
    """500 lines a file (a kernel file 700), 80 a function (a kernel 150), six positional arguments after self."""
    long = []
    for path in tracked(".py"):
        tree = ast.parse(path.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lines, limit = path.read_text().count("\n"), 700 if any(map(is_kernel, functions)) else 500
        where = path.relative_to(ROOT)
        if lines > limit:
            long.append(f"{where}: {lines} lines, at most {limit}")
        for node in functions:
            length, allowed = node.end_lineno - node.lineno + 1, 150 if is_kernel(node) else 80
            if length > allowed:
                long.append(f"{where}:{node.lineno} {node.name}: {length} lines, at most {allowed}")
            positional = [
                a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls", "ctx")
            ]
            if is_kernel(node) or is_operator(node) or node.name == "forward" or "tests" in where.parts:
                continue
            if len(positional) > 6:
                long.append(f"{where}:{node.lineno} {node.name}: {len(positional)} positional arguments, at most 6")
    assert long == []


def test_nothing_that_runs_code_on_load():
    """No pickle in any form, no eval, no yaml.load: files from elsewhere never run code here."""
    calls = ("pickle.load", "pickle.loads", "torch.load", "yaml.load", "eval", "exec", "marshal.loads")
    found = []
    for path in tracked(".py"):
        if path.is_relative_to(ROOT / "tests"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            allow = [k for k in node.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"]
            if ast.unparse(node.func) in calls or allow:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)}")
    assert found == []


def test_no_machine_paths():
    """Nothing in the tree names a directory of one machine or a registry's host."""
    bad = re.compile(r"/(work|root|home)/[a-z]|py" + r"pi\.org|python" + r"hosted|npm" + r"js\.org")
    found = []
    for path in tracked(".py", ".md", ".toml", ".txt", ".json", ".sh", ".cfg"):
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if bad.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_every_session_is_documented():
    """The table of docs/contributing.md has every session of noxfile.py; no document names one that there is not."""
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    decorated = {node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in functions}
    sessions = {name for name, text in decorated.items() if text == "inside" or text.startswith("nox.session")}
    assert {"tests", "environment"} <= sessions, "the sessions of noxfile.py are no longer found"
    table = re.findall(r"^\| `\./ci/nox -s (\w+)", (ROOT / "docs" / "contributing.md").read_text(), re.MULTILINE)
    assert sessions - set(table) == set(), "not in the table of docs/contributing.md"
    named = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in tracked(".md")
        for name in re.findall(r"\bnox -s (\w+)", path.read_text())
        if name not in sessions
    }
    assert named == set(), "no such session"
