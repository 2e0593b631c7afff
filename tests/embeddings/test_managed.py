"""Ids that earn their rows: the map against a plain one and against TorchRec's own module; rows that begin anew."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gem_embeddings import torchrec_tables
from gem_embeddings.api import build_tables
from gem_embeddings.initial import BLOCK_ROWS, initial_rows, initial_values
from gem_embeddings.interface import ManagedIds, RowWiseAdagrad, TableSpec
from gem_embeddings.managed import FREE, IdMap
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")


class PlainMap:
    """The eviction algorithm with lists and dicts. A slot: [id, row, count, last step]; free ones have id FREE."""

    def __init__(self, rows: int, how: ManagedIds) -> None:
        self.how, self.slots, self.step, self.seen = how, [[FREE, row, 0, 0] for row in range(rows)], 0, {}
        self.inserted = self.evicted = 0

    def row_of(self, number: int) -> int:
        return next((row for held, row, _, _ in self.slots if held == number != FREE), len(self.slots) - 1)

    def train(self, ids: list[int]) -> list[int]:
        """Rows that begin anew."""
        self.step += 1
        for number in ids:
            if number != FREE:
                count, _ = self.seen.get(number, (0, 0))
                self.seen[number] = (count + 1, self.step)
        return self._round() if self.step % self.how.interval == 0 else []

    def _score(self, count: int, last: int) -> float:
        age = (self.step - last + 1) ** self.how.decay_exponent
        return {"lfu": count, "lru": -age, "distance_lfu": count / age}[self.how.policy]

    def _round(self) -> list[int]:
        held = {slot[0]: slot for slot in self.slots}
        for number, (count, last) in self.seen.items():
            if number in held:
                held[number][2:] = [held[number][2] + count, last]
        new = sorted(((-c, number, last) for number, (c, last) in self.seen.items() if number not in held))
        scores = [self._score(slot[2], slot[3]) for slot in self.slots[:-1]]
        scores.append(float("inf") if self.how.policy != "lru" else self._score(0, self.step))
        every = [(-score, place) for place, score in enumerate(scores)]
        every += [(-self._score(-c, last), len(scores) + n) for n, (c, _, last) in enumerate(new)]
        every.sort()
        stay, go = every[: len(scores)], every[len(scores) :]
        lost = [place for _, place in go if place < len(scores)]
        gained = [new[place - len(scores)] for _, place in stay if place >= len(scores)]
        anew = []
        for place, (count, number, last) in zip(lost, gained, strict=True):
            slot = self.slots[place]
            self.inserted += 1
            if slot[0] != FREE:
                self.evicted += 1
                anew.append(slot[1])
            self.slots[place] = [number, slot[1], -count, last]
        self.slots = sorted(self.slots[:-1], key=lambda slot: slot[0]) + self.slots[-1:]
        self.seen = {}
        return sorted(anew)


def stream(steps: int, *, seed: int) -> list[torch.Tensor]:
    """Ids of a popularity that drifts, some negative, some huge, with one batch of none."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        ids = (torch.randn(25, generator=generator).abs() * 12).long() + step // 3
        found.append(ids * 7_000_000_000_123 - 5 if step != 4 else ids[:0])
    return found


HOW = [
    ManagedIds(policy="lfu", interval=3),
    ManagedIds(policy="lru", interval=2),
    ManagedIds(policy="lru", interval=1, decay_exponent=0.5),
    ManagedIds(policy="distance_lfu", interval=4),
    ManagedIds(policy="distance_lfu", interval=2, decay_exponent=2.0),
]
NAMES = [f"{how.policy}-{how.interval}-{how.decay_exponent}" for how in HOW]


@pytest.mark.parametrize("how", HOW, ids=NAMES)
def test_the_map_is_the_plain_one(how):
    own, plain = IdMap(9, how, CPU), PlainMap(9, how)
    for ids_N in stream(24, seed=1):
        rows, known = own.look_up(ids_N)
        assert rows.tolist() == [plain.row_of(number) for number in ids_N.tolist()]
        assert known.tolist() == [row != 8 for row in rows.tolist()]
        own.note(ids_N)
        anew = own.decide(own.seen()).tolist() if own.round_is_over else []
        assert anew == plain.train(ids_N.tolist())
        assert own.ids_R.tolist() == [slot[0] for slot in plain.slots]
        assert own.rows_R.tolist() == [slot[1] for slot in plain.slots]
    assert (own.inserted, own.evicted) == (plain.inserted, plain.evicted)
    assert own.evicted > 2
    assert own.ids_R[-1] == FREE


@pytest.mark.parametrize("how", HOW, ids=NAMES)
def test_the_map_is_that_of_torchrecs_module(how):
    """MCHManagedCollisionModule counts a batch before it maps it, we after: so the maps agree after each batch."""
    from gem_embeddings.managed import _policy
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    own = IdMap(9, how, CPU)
    theirs = MCHManagedCollisionModule(
        zch_size=9, device=CPU, eviction_policy=_policy(how), eviction_interval=how.interval
    )
    for ids_N in stream(24, seed=2):
        theirs.profile({"f": JaggedTensor(values=ids_N, lengths=torch.ones_like(ids_N))})
        own.note(ids_N)
        if own.round_is_over:
            own.decide(own.seen())
        assert torch.equal(own.ids_R, theirs._mch_sorted_raw_ids)
        assert torch.equal(own.rows_R, theirs._mch_remapped_ids_mapping)
        for name, values in own.about.items():
            assert torch.equal(values, theirs._mch_metadata[name])
    found = theirs.remap({"f": JaggedTensor(values=ids_N, lengths=torch.ones_like(ids_N))})["f"].values()
    assert torch.equal(own.look_up(ids_N)[0], found)


def test_the_worked_example():
    own = IdMap(3, ManagedIds(policy="lfu", interval=1), CPU)
    for ids, held in (([7, 7], {7: 1}), ([8], {7: 1, 8: 0}), ([9, 9, 9], {7: 1, 9: 0})):
        own.note(torch.tensor(ids))
        own.decide(own.seen())
        found = zip(own.ids_R.tolist(), own.rows_R.tolist(), strict=True)
        assert {number: row for number, row in found if number != FREE} == held
    assert (own.inserted, own.evicted) == (3, 1)


def test_an_id_of_the_largest_number_is_never_held():
    own = IdMap(4, ManagedIds(interval=1), CPU)
    own.note(torch.tensor([FREE, 5, FREE]))
    own.decide(own.seen())
    rows, known = own.look_up(torch.tensor([FREE, 5, 6]))
    assert rows.tolist() == [3, 2, 3]
    assert known.tolist() == [False, True, False]


@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_padding_is_no_id_that_came(one_process, impl):
    tables = make(impl)
    for _ in range(2):
        step(tables, batch([5, FREE, 6], seq=[FREE, FREE]))
    tables(batch([5, FREE, FREE, 7], seq=[FREE, 8]))
    rounds = {"inserted": 2, "evicted": 0}
    assert tables.policy_counts()["item"] == {"ids": 6, "outside": 5, **rounds}
    assert tables.policy_counts()["seq"] == {"ids": 1, "outside": 1, **rounds}


SPECS = (
    TableSpec(name="item", rows=6, dim=4, features=("item", "seq"), init_std=1.0),
    TableSpec(name="tag", rows=5, dim=4, features=("tags",), pooling="mean", init_std=1.0),
    TableSpec(name="plain", rows=4, dim=4, features=("p",), init_std=1.0),
)
MANAGED = {"item": ManagedIds(interval=2), "tag": ManagedIds(policy="lru", interval=1)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(impl="reference", **options):
    return build_tables(SPECS, optimizer=RowWiseAdagrad(lr=0.5), seed=1, impl=impl, managed=MANAGED, **options)


def batch(item, seq=(), tags=(), p=0):
    parts = {"item": [[i] for i in item], "seq": [list(seq)] + [[] for _ in item[1:]]}
    parts |= {"tags": [list(tags)] + [[] for _ in item[1:]], "p": [[p] for _ in item]}
    return KeyedJaggedTensor(
        keys=list(parts),
        values=torch.tensor([i for rows in parts.values() for row in rows for i in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for rows in parts.values() for row in rows]),
    )


def step(tables, ids, prepared=None, ahead=None):
    out = tables(ids) if prepared is None else tables.look_up(prepared)
    coming = None if ahead is None else tables.prepare(ahead)
    sum((vectors.square() + vectors).sum() for vectors in out.values()).backward()
    return coming


@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_evicted_rows_begin_anew(one_process, impl):
    tables = make(impl)
    start = tables.table_state()
    for _ in range(2):
        step(tables, batch([70, 80], tags=[1, 2, 3, 4]))
    trained = tables.table_state()
    held = dict(zip(*(tables.id_state()["item"][key].tolist() for key in ("ids", "rows")), strict=True))
    assert {70, 80} < held.keys()
    step(tables, batch([70]))  # the first on a row of its own
    step(tables, batch([70, 90, 90, 91, 91, 92, 92, 93, 93], seq=[90, 91, 92, 93]))
    state, maps = tables.table_state(), tables.id_state()
    assert {70, 93} < set(maps["item"]["ids"].tolist())
    assert 80 not in maps["item"]["ids"]
    row = held[80]
    for key in ("weight", "momentum"):
        assert torch.equal(state["item"][key][row], start["item"][key][row]), key
        assert not torch.equal(state["item"][key][held[70]], trained["item"][key][held[70]]), key
    assert state["item"]["momentum"][-1] > 0, "the shared row was trained"
    counts = tables.policy_counts()
    assert counts["item"] == {"ids": 14, "outside": 12, "inserted": 6, "evicted": 1}
    assert counts["seq"] == {"ids": 4, "outside": 4, "inserted": 6, "evicted": 1}
    assert "p" not in counts


def test_evicted_rows_are_kept_for_the_stream_that_reads_them(one_process, monkeypatch):
    """On CUDA they are made on the stream of ids and read on the current one, after a wait and a note of it."""
    tables, done = make("torchrec", sharding={"item": "data_parallel"}), []
    current = SimpleNamespace(wait_stream=lambda other: done.append(("wait", other)))
    rows_U = torch.tensor([1, 3])
    monkeypatch.setattr(tables, "_stream", "ids")
    monkeypatch.setattr(tables, "_managed", SimpleNamespace(settle=lambda: [("item", rows_U)]))
    monkeypatch.setattr(tables, "_reset", lambda name, rows: done.append(("reset", name)))
    monkeypatch.setattr(torchrec_tables, "on_stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda rows, stream: done.append(("note", rows is rows_U, stream is current))
    )
    tables._settle()
    assert done == [("wait", "ids"), ("note", True, True), ("reset", "item")]


@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_only_what_is_trained_is_counted(one_process, impl):
    """Neither an evaluation, nor a batch sent ahead, nor a step that is left out before its backward."""
    tables = make(impl)
    step(tables, batch([1, 2], tags=[5]))
    before = tables.id_state()
    with torch.no_grad():
        tables(batch([3, 3, 3], tags=[6]))
    tables(batch([4, 4, 4]))
    tables.prepare(batch([5, 5]))
    after = tables.id_state()
    for table, parts in before.items():
        for key, value in parts.items():
            assert torch.equal(after[table][key], value), (table, key)
    assert tables.policy_counts()["item"]["ids"] == 2 + 3 + 3


@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_batches_sent_ahead_train_the_same(one_process, impl):
    """Also across the end of a round, where the rows of prepared ids change; and each batch is counted once."""
    ahead, plain = (make(impl, policies={"p": "drop"}) for _ in range(2))
    prepared, batches = None, []
    for number, row in enumerate(draw(12)):
        batches.append(batch(row.tolist(), seq=row[:2].tolist(), tags=row[1:3].tolist(), p=number % 6))
    for number, ids in enumerate(batches):
        following = batches[number + 1] if number + 1 < len(batches) else None
        prepared = step(ahead, ids, prepared=prepared, ahead=following)
        step(plain, ids)
    assert_same(ahead, plain)
    assert ahead.policy_counts() == plain.policy_counts()
    assert plain.policy_counts()["item"]["evicted"] > 2
    assert plain.policy_counts()["p"] == {"ids": 60, "outside": 20}


def test_what_all_ranks_hold_is_there_to_be_compared(one_process):
    tables = make("torchrec", sharding={"plain": "data_parallel"})
    for row in draw(3):
        step(tables, batch(row.tolist(), tags=row.tolist(), p=2))
    parts, state, maps = tables.copied_parts(), tables.table_state()["plain"], tables.id_state()
    assert torch.equal(parts["plain.weight"], state["weight"])
    assert torch.equal(parts["plain.momentum"], state["momentum"])
    compared = {name for name in parts if not name.startswith("plain.")}
    assert {"item.ids", "item.rows", "item.counts", "tag.ids", "tag.rows", "tag.last_access_iter"} <= compared
    for name in compared:
        table, part = name.split(".")
        assert torch.equal(parts[name], maps[table][part]), name


def draw(steps):
    generator = torch.Generator().manual_seed(3)
    return [(torch.rand(5, generator=generator) * 6).long() * 1_000 + number // 2 for number in range(steps)]


def assert_same(first, second):
    for one, other in ((first.table_state(), second.table_state()), (first.id_state(), second.id_state())):
        assert one.keys() == other.keys()
        for table, parts in one.items():
            for key, value in parts.items():
                assert torch.equal(other[table][key], value), (table, key)


@pytest.mark.parametrize("impl", ["reference", "torchrec"])
def test_state_goes_on_in_another_object(one_process, impl):
    """In the middle of a round; what does not fit is refused whole."""
    source, target = make(impl), make(impl)
    rows = draw(9)
    for row in rows[:5]:
        step(source, batch(row.tolist(), tags=row.tolist()))
    broken = source.id_state()
    del broken["tag"]
    broken["item"] = {**broken["item"], "ids": broken["item"]["ids"][:3]}
    before = target.id_state()
    with pytest.raises(ValueError, match=r"'item': ids should be \(6,\).*\n.*'tag': ids is missing"):
        target.load_id_state(broken)
    assert torch.equal(target.id_state()["item"]["ids"], before["item"]["ids"])
    assert source.id_state()["item"]["seen_ids"].numel() > 0
    target.load_table_state(source.table_state())
    target.load_id_state(source.id_state())
    assert_same(source, target)
    for row in rows[5:]:
        for tables in (source, target):
            step(tables, batch(row.tolist(), tags=row.tolist()))
    assert_same(source, target)


def test_start_values_of_some_rows():
    spec = TableSpec(name="big", rows=2 * BLOCK_ROWS + 9, dim=4, features=("x",), init_std=0.5)
    rows = torch.tensor([2, 5, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 8])
    whole = initial_rows(spec, seed=3, start=0, stop=spec.rows)
    assert torch.equal(initial_values(spec, rows, seed=3), whole[rows])


@pytest.mark.parametrize(
    ("managed", "policies", "words"),
    [
        ({"items": ManagedIds()}, {}, "name table 'items'"),
        ({"item": ManagedIds(policy="fifo")}, {}, "'distance_lfu', got 'fifo'"),
        ({"item": ManagedIds(interval=0)}, {}, "interval must be at least 1"),
        ({"item": ManagedIds()}, {"seq": "hash"}, "feature 'seq': policy 'hash'"),
    ],
)
def test_managed_ids_that_cannot_be(managed, policies, words):
    with pytest.raises(ValueError, match=words):
        build_tables(SPECS, optimizer=RowWiseAdagrad(), seed=0, impl="reference", managed=managed, policies=policies)
