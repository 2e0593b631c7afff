"""What every test file may rely on: options of the procedures, ranks as processes, and no process group left over from
the file before.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much the reliability procedures do, and from which seed."""
    group = parser.getgroup("reliability")
    group.addoption("--full", action="store_true", help="the full counts of the procedures in tests/reliability")
    group.addoption("--share", type=int, default=1, help="with --full: one of so many slices of the full counts")
    group.addoption("--seed", type=int, default=None, help="seed of their random choices (default: a new one, printed)")


_SEED = random.SystemRandom().randrange(2**32)  # another one every session, unless --seed says which


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[..., int]:
    """count(fast=200, full_count=10_000) -> how many tries this session makes; --share 10 makes 1,000 of
    them (whole=True: a figure that no share divides).
    """
    full, share = bool(request.config.getoption("--full")), int(request.config.getoption("--share"))
    return lambda *, fast, full_count, whole=False: (
        fast if not full else full_count if whole else -(-full_count // share)
    )


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one procedure; the seed is printed with the test's output, and is a property of its report."""
    given = request.config.getoption("--seed")
    seed = _SEED if given is None else given
    print(f"seed {seed}   (repeat with --seed {seed})")
    request.node.user_properties.append(("seed", seed))
    return random.Random(f"{seed} {request.node.name}")


class RankParent:
    """A process of run_rank.py."""

    def __init__(self, environment: dict[str, str]) -> None:
        program = [sys.executable, str(Path(__file__).with_name("run_rank.py"))]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(program, text=True, env=environment, **pipes)

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process that forks ranks ended: {self._process.poll()}"
        (value,) = json.loads(line).values()
        return value

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _end_of(ranks: list[tuple[RankParent, int]], *, seconds: float) -> list[int | None]:
    """Exit codes; None for a rank that was stopped: after so many seconds, or five after another one failed."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [parent.ask(ended=[pid])[0] for parent, pid in ranks]
        if any(codes):
            deadline = min(deadline, time.monotonic() + 5)
        if None not in codes or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    for (parent, pid), code in zip(ranks, codes, strict=True):
        if code is None:
            parent.ask(stop=[pid])
    return codes


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """run_ranks(worker, world_size, *arguments, timeout_s=240, env=None): main(rank, world_size, init_method,
    *arguments) of the file `worker` on every rank.

    AssertionError with what each rank wrote where one fails; the others are then given five seconds. Ranks have the
    environment (or `env`) and the working directory that the test has at the call; what they started ends with them.

    Workers of a folder are forked from two processes that have imported what they need, ranks of even and of odd
    numbers: their seeds of Python's hashes differ, so that sets of text have other orders, as in ranks started one by
    one. Under another environment these are new ones: a library may read it when it is imported.
    """
    kept: dict[Path, tuple[dict[str, str], list[RankParent]]] = {}

    def parents_of(folder: Path, environment: dict[str, str]) -> list[RankParent]:
        given = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
        if folder in kept and kept[folder][0] != given:
            for parent in kept.pop(folder)[1]:
                parent.close()
        if folder not in kept:
            kept[folder] = given, [RankParent(given) for _ in range(2)]
        return kept[folder][1]

    def run(worker: Path, world_size: int, *arguments: str, timeout_s: float = 240, env: dict | None = None) -> None:
        folder = tmp_path_factory.mktemp("ranks")
        environment = dict(os.environ if env is None else env)
        parents = parents_of(worker.parent, environment)
        for parent in parents:
            parent.tell(load=str(worker.absolute()))
        for parent in parents:
            assert parent.answer() == [], "a fork of several threads is a fork of half a program"
        own = {"start": str(worker.absolute()), "environment": environment, "folder": os.getcwd()}
        ranks = []
        for rank in range(world_size):
            given = [rank, world_size, f"file://{folder / 'store'}", *arguments]
            parent = parents[rank % 2]
            said = str(folder / f"rank-{rank}.txt")
            ranks.append((parent, parent.ask(**own, arguments=given, said=said)))
        codes = _end_of(ranks, seconds=timeout_s)
        said = [f"rank {rank}, exit code {code}:\n" for rank, code in enumerate(codes)]
        texts = [(folder / f"rank-{rank}.txt").read_text()[-3000:] for rank in range(world_size)]
        assert codes == [0] * world_size, "\n".join(a + b for a, b in zip(said, texts, strict=True))

    yield run
    for _, parents in kept.values():
        for parent in parents:
            parent.close()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """End a process group that a file's tests left; looked up in sys.modules, so that torch is not imported for it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
