"""The version of every package moves with its signatures (ci/surface.py)."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))  # it imports a neighbour
spec = importlib.util.spec_from_file_location("surface", ROOT / "ci" / "surface.py")
surface = importlib.util.module_from_spec(spec)
sys.modules["surface"] = surface  # its dataclass looks itself up there
spec.loader.exec_module(surface)
sys.path.remove(str(ROOT / "ci"))

BASE = """
INTERFACE_VERSION = (1, 0)
class Loader(Protocol):
    size: int
    def epoch(self, n: int, *, seed: int = 0) -> Iterator: ...
class Group(ABC):
    @abstractmethod
    def launch(self, call: Call) -> Pending: ...
    def start(self, call: Call) -> Pending:
        return self.launch(call)
class Sized:
    def __init__(self, n: int) -> None: ...
    def __len__(self) -> int: ...
    class Inner:
        depth: int = 0
@dataclass(frozen=True, kw_only=True)
class Config:
    size: int
    depth: int = 2
@dataclass
class Pair:
    first: int
    second: int
    _hidden: int = 0
def build(path: str) -> Loader: ...
def call(name: str, *args: int, **options: str) -> None: ...
async def fetch(url: str) -> bytes: ...
"""


def of(source: str):
    return surface.Surface(version=surface.version_of(source), lines=tuple(surface.surface(source)))


@pytest.mark.parametrize("name", sorted(surface.interfaces()))
def test_package_is_as_frozen(name):
    now = surface.read_surface(surface.interfaces()[name])
    frozen = (surface.SNAPSHOTS / f"{name}.txt").read_text()
    assert surface.verdict(name, surface.frozen_surface(frozen), now) is None
    assert frozen == now.text(), "run: python ci/surface.py --update"


@pytest.mark.parametrize("name", sorted(surface.interfaces()))
def test_changes_begin_with_this_version(name):
    path = surface.interfaces()[name]
    headings = re.findall(r"^## (\d+\.\d+)$", (path.parents[1] / "CHANGES.md").read_text(), re.MULTILINE)
    assert headings[0] == ".".join(map(str, surface.version_of(path.read_text())))
    assert headings == sorted(headings, key=lambda text: [-int(part) for part in text.split(".")])


@pytest.mark.parametrize(
    ("edit", "move"),
    [
        (("seed: int = 0", "seed: int = 0"), "none"),
        (("seed: int = 0", "generator: int = 0"), "major"),  # renamed keyword
        (("seed: int = 0", "seed: int = 1"), "major"),  # changed default
        (("depth: int = 2", "depth: int = 2\n    width: int = 3"), "minor"),  # new field with a default
        (("size: int\n    depth", "size: int\n    width: int\n    depth"), "major"),  # new field that callers must give
        (("size: int\n    depth: int = 2", "depth: int = 2\n    size: int"), "none"),  # given by name: no order
        (("path: str", "path: str, *, name: str"), "major"),  # new required parameter
        (("path: str", "path: str, *, name: str = ''"), "minor"),
        (("path: str", "path: str, /"), "major"),  # no longer by name
        (("def build", "def open(path: str) -> Loader: ...\ndef build"), "minor"),  # new function
        (("def build", "def _build"), "major"),  # gone
        (("*args: int, ", ""), "major"),
        ((", **options: str", ""), "major"),
        (("path: str", "path: str, *more: str"), "minor"),
        (("    def __len__(self) -> int: ...\n", ""), "major"),
        (("__init__(self, n: int)", "__init__(self, n: str)"), "major"),
        (("def __len__", "def __iter__(self) -> Iterator: ...\n    def __len__"), "minor"),
        (("def __len__", "def __post_init__(self) -> None: ...\n    def __len__"), "none"),  # nobody calls it
        (("depth: int = 0", "width: int = 0"), "major"),  # in a class in a class
        (("async def fetch", "async def _fetch"), "major"),
        (("async def fetch", "def fetch"), "major"),
        (("first: int\n    second: int", "second: int\n    first: int"), "major"),  # given by place: order
        (("    _hidden: int = 0", "    _hidden: int = 0\n    third: int = 0"), "minor"),
        (("    _hidden: int = 0", "    third: int = 0\n    _hidden: int = 0"), "minor"),
        (("    first: int", "    zeroth: int = 0\n    first: int"), "major"),
        (("    _hidden: int = 0", "    _: KW_ONLY\n    third: int = 0"), "minor"),
        (("def build", "if sys.version_info > (3, 12):\n    def late() -> int: ...\ndef build"), "minor"),
    ],
)
def test_move(edit, move):
    assert edit[0] in BASE
    assert surface.required_move(of(BASE).lines, of(BASE.replace(*edit)).lines)[0] == move


@pytest.mark.parametrize(
    ("edit", "move"),
    [
        (("class Loader(Protocol):", "class Loader(Protocol):\n    def close(self) -> None: ..."), "major"),
        (("class Loader(Protocol):", "class Loader(Protocol):\n    def close(self) -> None:\n        pass"), "major"),
        (("class Loader(Protocol):", "class Loader(Protocol):\n    def __len__(self) -> int: ..."), "major"),
        (("class Loader(Protocol):", "class Loader(Protocol):\n    rows: int"), "major"),
        (("seed: int = 0", "seed: int = 0, last: bool = False"), "major"),  # no old epoch() takes it
        (("class Group", "class Saver(Protocol):\n    def save(self) -> None: ...\nclass Group"), "minor"),
        (("    def start", "    @abstractmethod\n    def stop(self) -> None: ...\n    def start"), "major"),
        (("    def start", "    def stop(self) -> None: ...\n    def start"), "minor"),  # inherited
        (("launch(self, call: Call)", "launch(self, call: Call, limit: int = 0)"), "major"),
        (("start(self, call: Call)", "start(self, call: Call, limit: int = 0)"), "minor"),
    ],
)  # fmt: skip
def test_what_implementations_must_provide_is_breaking(edit, move):
    assert edit[0] in BASE
    assert surface.required_move(of(BASE).lines, of(BASE.replace(*edit)).lines)[0] == move


# What a signature refers to without a name of its own.
HIDDEN = """
_SIZE = 5
_Kind = Literal["a", "b"]
_Rows = Sequence[int]
class _Deep:
    depth: int = 0
    def sink(self) -> int: ...
class _Named(_Deep):
    name: str = ""
    def said(self) -> str: ...
class _Opens(Protocol):
    def open(self) -> int: ...
class _Options:
    limit: int = 0
class Port(_Opens, Protocol):
    def close(self) -> None: ...
@dataclass(kw_only=True)
class Ship(_Named):
    size: int = _SIZE
    def said(self) -> str: ...
def load(kind: _Kind, rows: _Rows, n: int = _SIZE, options: _Options | None = None) -> None: ...
"""


@pytest.mark.parametrize(
    ("edit", "move"),
    [
        (("_SIZE = 5", "_SIZE = 6"), "major"),  # a default
        (("_SIZE", "_LENGTH"), "none"),  # a name that nobody sees
        (('"a", "b"', '"a"'), "major"),
        (("Sequence[int]", "list[int]"), "major"),
        (("    depth: int = 0\n", ""), "major"),
        (("    def sink(self) -> int: ...\n", ""), "major"),
        (('    name: str = ""\n', ""), "major"),
        (("class _Named(_Deep):", "class _Named:"), "major"),
        (("    name: str", "    port: str = ''\n    name: str"), "minor"),
        (("def said(self) -> str: ...\nclass _Opens", "def said(self) -> int: ...\nclass _Opens"), "none"),  # replaced
        (("    def open", "    def shut(self) -> int: ...\n    def open"), "major"),  # no old Port has it
        (("    def open(self)", "    def open(self, n: int = 0)"), "major"),
        (("limit: int", "most: int"), "major"),
    ],
)
def test_what_has_no_name_of_its_own_is_part_of_what_refers_to_it(edit, move):
    changed = HIDDEN.replace(*edit)
    assert changed != HIDDEN
    assert surface.required_move(surface.surface(HIDDEN), surface.surface(changed))[0] == move


@pytest.mark.parametrize("prefix", ["", "api."])
def test_what_is_imported_as_itself_is_promised(prefix):
    lines = surface.surface("from gem_x.parts import build as build\nfrom gem_x.parts import other\n", prefix=prefix)
    assert lines == [f"{prefix}build = gem_x.parts.build"]
    assert surface.required_move(lines, surface.surface("", prefix=prefix))[0] == "major"


HANDED = """
@dataclass(frozen=True, kw_only=True)
class Config:
    cost: Cost | None = None
@dataclass(frozen=True, kw_only=True)
class Cost:
    terms: tuple[Term, ...] = ()
@dataclass(frozen=True, kw_only=True)
class Term:
    weight: float = 1.0
    def total(self) -> float: ...
@dataclass(frozen=True, kw_only=True)
class Report:
    rows: int = 0
class Group(ABC):
    @abstractmethod
    def launch(self, call: Call) -> Report: ...
    def start(self, request: Request) -> Report: ...
@dataclass(frozen=True, kw_only=True)
class Call:
    x: int = 0
@dataclass(frozen=True, kw_only=True)
class Request:
    x: int = 0
class Plain:
    config: int = 0
"""
FACTORIES = {
    "protocol": "class LoaderFactory(Protocol):\n    def __call__(self, *, config: Config) -> Report: ...",
    "alias": "Factory = Callable[[Sequence[Config], int], Report]",
}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    ("before", "move"),
    [
        ("    cost: ", "major"),  # what builds a loader takes it
        ("    terms: ", "major"),  # it holds it
        ("    weight: ", "major"),
        ("    def total", "minor"),  # as a method: inherited
        ("    rows: ", "minor"),  # handed out, not in
        ("    x: int = 0\n@", "major"),  # what an abstract method takes
        ("    x: int = 0\nclass Plain", "minor"),  # what an inherited one takes
        ("    config: ", "minor"),
    ],
)
def test_a_field_that_implementations_must_obey_is_breaking(factory, before, move):
    def lines(source):
        return [*surface.surface(source), *surface.surface(FACTORIES[factory], prefix="testing.")]

    what = "    def more(self) -> int: ...\n" if "def" in before else "    more: int = 0\n"
    changed = HANDED.replace(before, what + before, 1)
    assert changed != HANDED
    assert surface.required_move(lines(HANDED), lines(changed))[0] == move


def test_a_new_setting_of_loaders_is_breaking():
    frozen = surface.frozen_surface((surface.SNAPSHOTS / "gem_data.txt").read_text()).lines
    for line in ("LoaderConfig.more: int = 0", "CostTerm.more: int = 0"):
        assert surface.required_move(frozen, [*frozen, line])[0] == "major"
    assert surface.required_move(frozen, [*frozen, "testing.Quirks.more: bool = True"])[0] == "minor"


def imported(paths) -> set[tuple[str, str, str]]:
    """(package, module, name) of what these files import from packages."""
    found = set()
    for path in paths:
        text = path.read_text()
        sources = re.findall(r"```(?:{[\w-]+} )?python\n(.*?)```", text, re.DOTALL) if path.suffix == ".md" else [text]
        for node in (node for source in sources for node in ast.walk(ast.parse(source))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in surface.interfaces():
                package, _, module = node.module.partition(".")
                found |= {(package, module, alias.name) for alias in node.names}
    return found


def test_what_the_pipeline_and_out_of_tree_users_import_is_frozen():
    pipeline = imported((ROOT / "pipelines").rglob("*.py"))
    users = imported((ROOT / "docs" / "examples").glob("*.py"))
    rows = [line for line in (ROOT / "docs" / "out-of-tree.md").read_text().splitlines() if line.startswith("| ")]
    for package, rest in (found for row in rows for found in re.findall(r"(gem_\w+)\.testing(.*)", row)):
        users |= {(package, "testing", name) for name in ["Quirks", *re.findall(r"\b(?:check|run|conform)\w+", rest)]}
    assert len(pipeline) > 70
    assert ("gem_comm", "testing", "check_codec") in users
    missing = []
    for package, module, name in sorted(pipeline | users):
        told = surface.frozen_surface((surface.SNAPSHOTS / f"{package}.txt").read_text()).lines
        wanted = name if module == "interface" else f"{module}.{name}"
        if not any(re.match(rf"(class |def |async def )?{re.escape(wanted)}\b", line) for line in told):
            missing.append(f"{package}.{module}.{name}")
    assert not missing, f"list them in ci/surface.toml, and run: python ci/surface.py --update: {missing}"


@pytest.mark.parametrize(
    ("move", "accepted"),
    [("none", ["(1, 0)"]), ("minor", ["(1, 1)", "(2, 0)"]), ("major", ["(2, 0)"])],
)
def test_the_version_moves_as_it_must(move, accepted):
    edit = {"none": ("", ""), "minor": ("path: str", "path: str, n: int = 0"), "major": ("path: str", "n: int")}[move]
    for version in ("(1, 0)", "(1, 1)", "(2, 0)"):
        changed = of(BASE.replace(*edit).replace("(1, 0)", version))
        assert (surface.verdict("gem_x", of(BASE), changed) is None) == (version in accepted), version


API = """
from gem_x.parts import build as build, Report
from gem_x.interface import Loader
__all__ = ["IMPLS", "Loader", "Report", "build", "open_all"]
IMPLS = ("one", "two")
def open_all(path: str) -> Loader: ...
def hidden() -> None: ...
"""
PARTS = """
from gem_x.report import Report
def build(path: str, n: int = 1) -> int: ...
def other() -> None: ...
"""
REPORT = """
@dataclass(kw_only=True)
class Report:
    rows: int
"""


@pytest.fixture
def package(tmp_path):
    """A repository with one package gem_x; edit(file, old, new) changes it."""
    directory = tmp_path / "packages" / "x" / "gem_x"
    directory.mkdir(parents=True)
    files = {"interface": BASE, "api": API.replace("build as build", "build"), "parts": PARTS, "report": REPORT}
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)

    def edit(name, old, new):
        path = directory / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return edit


def run(tmp_path, *, update=False, anew=()):
    return surface.check(tmp_path, tmp_path / "snapshots", update=update, anew=anew)


@pytest.mark.parametrize(
    ("edit", "move"),
    [
        (("parts", "n: int = 1", "n: int = 2"), "major"),
        (("parts", "n: int = 1", "n: int = 1, m: int = 0"), "minor"),
        (("report", "rows: int", "rows: int\n    more: int"), "major"),  # handed on twice
        (("parts", "def other() -> None", "def other(n: int) -> None"), "none"),
        (("api", "def hidden() -> None", "def hidden(n: int) -> None"), "none"),
        (("api", '"Loader", ', ""), "major"),
        (("api", '("one", "two")', '("one", "two", "three")'), "minor"),
        (("api", '("one", "two")', '("one",)'), "major"),
    ],
)
def test_names_of_the_api_are_followed(package, tmp_path, edit, move):
    assert run(tmp_path, update=True) == []
    package(*edit)
    problems = run(tmp_path)
    wanted = {
        "none": [],
        "minor": ["an addition needs version (1, 1)"],
        "major": ["breaking change needs version (2, 0)"],
    }
    assert len(problems) == len(wanted[move]), problems
    assert all(words in problem for words, problem in zip(wanted[move], problems, strict=True)), problems


def test_a_class_that_is_referred_to_and_not_listed_is_an_error(package, tmp_path):
    package("parts", "def build(path: str, n: int = 1) -> int", "def build(path: str, n: Made | None = None) -> int")
    package("parts", "def other", "class Made:\n    rows: int = 0\n    def fill(self, n: int) -> None: ...\ndef other")
    for update in (False, True):
        (problem,) = run(tmp_path, update=update)
        assert "gem_x: promised signatures refer to classes that are not promised" in problem
        assert "parts.Made (in parts.py); list them in ci/surface.toml" in problem
    listing = tmp_path / "ci" / "surface.toml"
    listing.parent.mkdir()
    listing.write_text('[gem_x]\nparts = ["Made"]\n')
    assert run(tmp_path, update=True) == []
    package("parts", "rows: int", "lines: int")
    assert "breaking change needs version (2, 0)" in run(tmp_path)[0]
    package("parts", "lines: int", "rows: int")
    listing.write_text('[gem_x]\nparts = ["Made", "-Made.fill"]\n')
    assert "- def parts.Made.fill -> None" in run(tmp_path)[0]
    assert run(tmp_path, anew=["gem_x"]) == []
    package("parts", "fill(self, n: int)", "fill(self, n: Hidden)")  # not promised, so what it refers to is not, either
    assert run(tmp_path) == []
    listing.write_text('[gem_x]\nparts = ["Made", "-Made.empty"]\n')
    assert run(tmp_path) == ["gem_x: parts.Made.empty: left out, and not defined there"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("parts", "def build(n: Callable[[Made], bool]) -> int: ...\ndef other() -> None: ..."),
        ("parts", "def build() -> _Made: ...\nclass _Made:\n    made: Made"),
        ("parts", "_Alias = list[Made]\ndef build() -> _Alias: ..."),
        ("report", "class Report(Base):\n    rows: int\nclass Base:\n    made: Made"),
        ("report", "class Report:\n    def __init__(self) -> None:\n        self.made: Made = make()"),
        ("report", "class Report:\n    @property\n    def made(self) -> Made: ..."),
        ("report", "from gem_x.bases import Base\nclass Report(Base):\n    rows: int"),
    ],
)
def test_a_class_is_referred_to_wherever_it_stands(package, tmp_path, file, source):
    directory = tmp_path / "packages" / "x" / "gem_x"
    (directory / "bases.py").write_text("class Made:\n    rows: int\nclass Base:\n    made: Made\n")
    if "gem_x.bases" not in source:
        source = f"from gem_x.bases import Made\n{source}"
    before = (directory / f"{file}.py").read_text()
    package(file, before, f"from gem_x.report import Report\n{source}\n" if file == "parts" else f"{source}\n")
    (problem,) = run(tmp_path, update=True)
    assert "bases.Made (in " in problem


def test_a_snapshot_that_is_missing_is_not_simply_written(package, tmp_path):
    snapshot = tmp_path / "snapshots" / "gem_x.txt"
    assert run(tmp_path, update=True) == []  # a new package at (1, 0)
    before = snapshot.read_text()
    package("interface", "(1, 0)", "(1, 1)")
    package("interface", "def build", "def more() -> int: ...\ndef build")
    snapshot.unlink()
    for update in (False, True):
        (problem,) = run(tmp_path, update=update)
        assert "no frozen surface to compare version (1, 1) with" in problem
        assert not snapshot.exists()
    snapshot.write_text(before)
    assert run(tmp_path, update=True) == []
    assert "def more -> int" in snapshot.read_text()
    package("interface", "def more", "def less")
    assert "breaking" in run(tmp_path, update=True)[0]
    assert run(tmp_path, anew=["gem_x"]) == []
    assert "def less -> int" in snapshot.read_text()


def test_a_first_version_that_was_frozen_before_is_not_simply_written(package, tmp_path):
    def git(*arguments):
        own = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert run(tmp_path, update=True) == []
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "snapshots" / "gem_x.txt").unlink()
    package("interface", "def build", "def open")
    (problem,) = run(tmp_path, update=True)
    assert "git checkout -- " in problem
    assert "--anew gem_x" in problem


def test_a_snapshot_without_a_package_and_a_package_that_is_none(package, tmp_path):
    assert run(tmp_path, update=True) == []
    (tmp_path / "snapshots" / "gem_gone.txt").write_text("INTERFACE_VERSION = (1, 0)\n")
    problems = run(tmp_path, anew=["gem_y"])
    assert len(problems) == 2
    assert "gem_y: no such package; there are gem_x" in problems[0]
    assert "gem_gone: frozen, but there is no such package" in problems[1]
