"""T3: the power goes at any moment of a run that saves: what was called durable is there afterwards, whole.

What a run does to files is recorded once: making its directory, ledger segments, full and incremental checkpoints, the
removal of old ones. Then every prefix of these operations is cut off, and what was not fsynced by then is dropped,
kept, or kept in part, at random (power.py). In every such state the newest checkpoint that had been called durable, or
a newer one, loads with the right content, and the ledger covers it.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from gem_pipelines import checkpoint_format
from gem_pipelines.checkpoint_format import Checkpoint, step_directory
from gem_pipelines.checkpoint_incremental import Chain, read_whole
from gem_pipelines.checkpoint_keep import Keeper, find_latest
from gem_pipelines.errors import RunError
from gem_pipelines.ledger import Ledger, read_ledger
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runtime import Runtime
from gem_pipelines.safe_files import sync_directory
from power import Recorder, crash

STEPS, EVERY = 12, 2


def content(step):
    table = torch.zeros(400, 8)
    table[: step * 3] = float(step)
    tensors = {
        "tables.t.weight": table,
        "tables.t.momentum": table[:, 0].clone(),
        "dense.w": torch.full((300,), 1.0 * step),
    }
    return Checkpoint(tensors=tensors, state={"step": step}, about={})


class Rows:
    """What a ledger needs of a batch."""

    def __init__(self, step):
        self.sample_ids = torch.arange(4) + 4 * step


def act(root, *, say):
    """What a run does to its files, in the order in which it does it."""
    (root / "runs").mkdir()
    sync_directory(root)  # the user's own, from before
    directory = RunDirectory(root / "runs" / "a" / "b")
    lock = directory.acquire_lock()
    directory.create(find_recipe("debug"), command="gemline train")
    runtime = Runtime(rank=0, world_size=1, device=torch.device("cpu"))
    notes = Ledger(directory.path / "ledger", runtime=runtime, enabled=True)
    chain, keeper = Chain(full_every=3), Keeper(directory.checkpoints, keep=2)
    for step in range(1, STEPS + 1):
        notes.note([Rows(step)], step=step, epoch=0, trained=True)
        if step % EVERY == 0:
            notes.commit(step)
            chain.write(step_directory(directory.checkpoints, step), content(step))
            say(step)
            keeper.sweep()
    directory.give_up_lock(lock)


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(checkpoint_format, "SHARD_BYTES", 8_000)
    root = tmp_path_factory.mktemp("power")
    with Recorder(root) as recorder:
        act(root, say=lambda step: recorder.note(str(step)))
    patch.undo()
    return recorder.operations


def problem(root, durable):
    """What is wrong with the state that was left; "" where all that had been called durable is there."""
    directory = RunDirectory(root / "runs" / "a" / "b")
    if not durable and not directory.config_file.exists():
        return ""  # nothing had begun
    if not directory.config_file.exists():
        return "config.json is gone"
    try:
        directory.read_config()
    except RunError as error:
        return str(error)
    found = find_latest(directory.checkpoints, say=lambda line: None)
    if (found or 0) < durable:
        return f"step {durable} was durable, the newest sound one is {found}"
    if found is None:
        return ""
    read, expected = read_whole(step_directory(directory.checkpoints, found)), content(found)
    if read.state != expected.state or any(not torch.equal(read.tensors[k], v) for k, v in expected.tensors.items()):
        return f"step {found} holds something else"
    if not (directory.path / "ledger").is_dir():
        return f"no ledger beside step {found}"
    runtime = Runtime(rank=0, world_size=1, device=torch.device("cpu"))
    Ledger(directory.path / "ledger", runtime=runtime, enabled=True).forget_after(found)
    steps = read_ledger(directory.path / "ledger")["step"].tolist()
    if steps != [step for step in range(1, found + 1) for _ in range(4)]:
        return f"the ledger of step {found} has steps {sorted(set(steps))}"
    return ""


def states(operations, rng, tries, tmp_path):
    """(what is wrong, after which operation) of every state that is tried: the prefixes in turn, shuffled, and of what
    is not durable nothing, all, or a share.
    """
    prefixes = list(range(1, len(operations) + 1))
    rng.shuffle(prefixes)
    for turn in range(tries):
        number = prefixes[turn % len(prefixes)]
        durable = max((int(parts[0]) for kind, *parts in operations[:number] if kind == "note"), default=0)
        root = tmp_path / "state"
        crash(operations[:number], rng, root, likely=rng.choice([0.0, 1.0, rng.random()]))
        yield problem(root, durable), number
        shutil.rmtree(root)


def test_t3_every_prefix_recovers(operations, rng, count, counted, tmp_path):
    found = list(states(operations, rng, count(fast=40, full_count=5_000), tmp_path))
    wrong = [(text, operations[number - 1][:2]) for text, number in found if text]
    assert wrong == []
    kinds = {kind for kind, *_ in operations}
    assert kinds == {"create", "sync", "sync_dir", "rename", "mkdir", "unlink", "rmdir", "note"}
    reached = len({number for _, number in found})
    counted("states recovered", f"{len(found)} of {len(found)}, after {reached} of {len(operations)} operations")


@pytest.mark.parametrize("forgotten", ["sync", "sync_dir", "the ledger's directory"])
def test_the_procedure_sees_a_flush_that_is_left_out(operations, rng, tmp_path, forgotten):
    """Without the fsyncs of files, or of directories, or of the one that holds the ledger, some state is wrong."""
    if forgotten == "the ledger's directory":
        made = next(n for n, operation in enumerate(operations) if operation == ("mkdir", "runs/a/b/ledger"))
        assert operations[made + 1] == ("sync_dir", "runs/a/b")
        spoilt = [o for n, o in enumerate(operations) if n < made or o[:2] != ("sync_dir", "runs/a/b")]
    else:
        spoilt = [operation for operation in operations if operation[0] != forgotten]
    assert any(text for text, _ in states(spoilt, rng, 400, tmp_path))
