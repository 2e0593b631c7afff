"""Every member of every Protocol is used by the shipped suite, so that an implementation that lacks it is told.

Implementations are wrapped in something that is none of their classes, hands everything on and writes down what it was
asked for: so the suites are also seen to need no base class.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from gem_attention import block_testing
from gem_attention import testing as attention_testing
from gem_attention.api import attention
from gem_comm import testing as comm_testing
from gem_comm.quantized import make_codec
from gem_comm.single import SingleCollectives
from gem_data import testing as data_testing
from gem_data.api import build_loader
from gem_embeddings import testing as tables_testing
from gem_embeddings.reference import ReferenceTables

ROOT = Path(__file__).parents[2]


def promised() -> dict[str, set[str]]:
    """ "gem_data.Loader" -> its attributes and methods, of every Protocol and abstract class of every interface."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/gem_*/interface.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & {"Protocol", "ABC"}:
                fields = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                found[f"{path.parent.name}.{node.name}"] = fields | methods
    return found


class Told:
    """Hands everything on to `inner`. asked: names of what it was asked for; wrap: method -> those of its result."""

    def __init__(self, inner, asked, **wrap):
        self._inner, self._asked, self._wrap = inner, asked, wrap

    def __getattr__(self, name):
        self._asked.add(name)
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*arguments, **options):
            result = value(*(a._inner if isinstance(a, Told) else a for a in arguments), **options)
            return Told(result, self._wrap[name]) if name in self._wrap else result

        return call

    def __call__(self, *arguments, **options):
        self._asked.add("__call__")
        return self._inner(*arguments, **options)


class OneExchange:
    """An Exchange of one rank."""

    rank, size = 0, 1

    def all_gather(self, x):
        return x.clone()

    reduce_scatter = all_reduce = all_gather

    def begin(self, kind, x):
        return SimpleNamespace(wait=x.clone)


def run_loader(tmp_path, asked):
    cases = data_testing.conformance_cases(data_testing.Quirks(world_sizes=(1,), requests=False))
    cases.sort(key=lambda case: case.name == "resume after every step")  # takes seconds: last, if at all
    for number, case in enumerate(cases):
        if case.skipped is None:
            (tmp_path / f"{number}").mkdir()
            case.run(
                lambda directory, **arguments: Told(build_loader(directory, **arguments), asked["gem_data.Loader"]),
                tmp_path / f"{number}",
            )
            yield


def run_tables(tmp_path, asked):
    def factory(specs, optimizer, seed, **options):
        tables = ReferenceTables(specs, optimizer=optimizer, seed=seed, **options)
        return Told(tables, asked["gem_embeddings.Tables"], prepare=asked["gem_embeddings.Prepared"])

    for check in (*reversed(tables_testing.CHECKS), *tables_testing.CONFIGURED_CHECKS):
        check(factory, tables_testing.Quirks())
        yield


def run_exchange(tmp_path, asked):
    exchange = Told(OneExchange(), asked["gem_embeddings.Exchange"], begin=asked["gem_embeddings.Pending"])
    tables_testing.check_exchange(exchange)
    yield


def run_collectives(tmp_path, asked):
    inner, mine = SingleCollectives(axis="shard"), asked["gem_comm.Collectives"]
    launch = inner.launch

    def told(call):  # what `start`, which is inherited, is for
        mine.add("launch")
        return launch(call)

    inner.launch = told
    waited = asked["gem_comm.Pending"]
    for check in comm_testing.CHECKS:
        check(Told(inner, mine, start=waited, begin=waited), comm_testing.Quirks())
        yield


def run_codec(tmp_path, asked):
    comm_testing.check_codec(Told(make_codec("int8"), asked["gem_comm.Codec"]))
    yield


def run_attention(tmp_path, asked):
    for check in attention_testing.conformance(attention_testing.Quirks()):
        check(Told(attention, asked["gem_attention.Attention"]))
        yield


def run_block(tmp_path, asked):
    for check in block_testing.conformance(block_testing.BlockQuirks()):
        check(Told(block_testing.named("eager"), asked["gem_attention.Block"]))
        yield


RUNS = {
    run_loader: ("gem_data.Loader",),
    run_tables: ("gem_embeddings.Tables", "gem_embeddings.Prepared"),
    run_exchange: ("gem_embeddings.Exchange", "gem_embeddings.Pending"),
    run_collectives: ("gem_comm.Collectives", "gem_comm.Pending"),
    run_codec: ("gem_comm.Codec",),
    run_attention: ("gem_attention.Attention",),
    run_block: ("gem_attention.Block",),
}


def test_every_protocol_has_a_suite():
    assert sorted(itertools.chain.from_iterable(RUNS.values())) == sorted(promised())


@pytest.mark.parametrize("suite", RUNS, ids=lambda suite: suite.__name__)
def test_the_suite_uses_every_member(suite, tmp_path):
    wanted = {name: promised()[name] for name in RUNS[suite]}
    asked = {name: set() for name in wanted}
    missing = wanted
    for _ in suite(tmp_path, asked):  # no further than until all was asked for
        missing = {name: members - asked[name] for name, members in wanted.items()}
        if not any(missing.values()):
            break
    assert not any(missing.values()), f"the suite never uses {missing}"
