"""Which samples were trained, step by step: the proof that each was trained exactly once.

    ledger/step-00000010.parquet      the steps since the segment before, up to and with step 10
        step int64, epoch int64, rank int64, trained bool, sample_id int64      one row a sample, in global order
        metadata first_step     the first step that it is about, also where that step had no rows

Every rank notes the ids of its batches after the step that trained them (or left them out: trained False). At a
checkpoint the notes go to rank 0, which writes one segment, all or nothing and durable, before the checkpoint of that
step is. So a step's samples are in the ledger if and only if the run can go on from after it: a resume removes the
segments beyond its checkpoint, and with them the samples that will be trained again.

Off by default: it costs 8 bytes a sample and more on disk, which is much over a long run. The position that a
checkpoint holds is what prevents repetition; this is the evidence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from gem_data.api import read_schema
from gem_data.interface import Batch
from gem_data.remote import DataPath

from gem_pipelines.config import DataConfig
from gem_pipelines.errors import RunError
from gem_pipelines.rundir import read_records
from gem_pipelines.runtime import Runtime
from gem_pipelines.safe_files import sync_directory

_SEGMENT = re.compile(r"step-(\d{8,})\.parquet")
_FIRST = b"first_step"
_COLUMNS = ("step", "epoch", "rank", "trained", "sample_id")
Int64 = npt.NDArray[np.int64]


class Ledger:
    """Notes of this rank since the last segment. enabled False: every call does nothing."""

    def __init__(self, directory: Path, *, runtime: Runtime, enabled: bool) -> None:
        self.directory, self.runtime, self.enabled = directory, runtime, enabled
        self._notes: list[torch.Tensor] = []
        self._first: int | None = None  # of the steps noted: one whose rows are all quarantined leaves no row

    def note(self, batches: Sequence[Batch], *, step: int, epoch: int, trained: bool) -> None:
        """`batches` are what this rank held of `step`."""
        if not self.enabled:
            return
        self._first = step if self._first is None else self._first
        ids = torch.cat([batch.sample_ids.cpu() for batch in batches]).long()
        about = torch.tensor([step, epoch, self.runtime.rank, int(trained)]).expand(ids.numel(), 4)
        self._notes.append(torch.cat([about, ids[:, None]], dim=1))

    def commit(self, step: int) -> None:
        """Write what was noted as the segment of `step`. A collective; durable when it returns."""
        if not self.enabled:
            return
        mine = torch.cat(self._notes) if self._notes else torch.zeros(0, len(_COLUMNS), dtype=torch.int64)
        rows = self.runtime.gather_rows(mine).numpy()
        first = step if self._first is None else self._first
        self._notes, self._first = [], None
        # Rows of a rank are in the order of steps; a stable sort by step leaves ranks, and rows within them, in order.
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        self.runtime.on_main(lambda: _write_segment(self.directory, first, step, rows))

    def forget_after(self, step: int) -> None:
        """Remove segments beyond `step`: their samples are trained again; and what a kill left half written. For one
        rank. A segment is durable before the checkpoint of its step, so that checkpoint may never have come.
        """
        for last, path in _segments(self.directory):
            if last > step:
                path.unlink()
        for path in self.directory.glob(".step-*"):
            path.unlink()


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """What a ledger says. twice, lost: sample ids that a finished epoch has more than once, or not at all.

    complete  epochs that were finished; in the unfinished last one only `twice` can be told
    pending   sample ids that the unfinished epoch has not, or not yet
    dropped   sample ids that finished epochs left out because of data.drop_last, all epochs together
    """

    steps: int
    trained: int
    skipped: int
    complete: int
    pending: int
    dropped: int
    twice: tuple[int, ...]
    lost: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Nothing was trained twice, nothing is missing."""
        return not self.twice and not self.lost


def read_ledger(directory: Path) -> dict[str, Int64]:
    """Column -> values, of all segments in order. Raises RunError where there is none or one cannot be read."""
    segments = _segments(directory)
    if not segments:
        raise RunError(
            f"{directory} has no segments: the run was made without --train.ledger True, or saved nothing yet"
        )
    try:
        tables = [pq.read_table(path, page_checksum_verification=True, columns=list(_COLUMNS)) for _, path in segments]
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{directory}: a segment cannot be read: {error}") from None
    whole = pa.concat_tables(tables)
    return {name: whole.column(name).to_numpy().astype(np.int64) for name in _COLUMNS}


def verify_run(run: Path, data: DataPath, config: DataConfig) -> LedgerReport:
    """`verify_ledger` of a run directory: what its records say was finished and quarantined is taken from there.

    config  the run's

    Raises RunError where the ledger does not reach the end of the run.
    """
    metrics = run / "metrics.jsonl"
    records = read_records(metrics) if metrics.is_file() else []
    ends = [record for record in records if record.get("kind") == "end"]
    segments = _segments(run / "ledger")
    if ends and segments and segments[-1][0] < ends[-1]["step"]:
        raise RunError(
            f"{run / 'ledger'} ends at step {segments[-1][0]}, the run at step {ends[-1]['step']}: its last part was "
            "made without --train.ledger True, or segments were removed; what was trained there is not known"
        )
    groups = [group for record in records if record.get("kind") == "quarantine" for group in record["groups"]]
    rows = sum(file.rows for file in read_schema(data).files if file.split == "train")
    end = ends[-1] if ends else {}
    if end.get("epoch_rows", rows) != rows:  # the log has grown since: what was an epoch then is a part of one now
        end = {}
    dropped_rows = end.get("dropped_rows", 0)
    if config.drop_last and config.stream_seconds is None:
        dropped_rows = rows % config.global_batch_size  # also of epochs of a run that has not come to its end
    return verify_ledger(
        run / "ledger",
        data,
        quarantined=_ids_of_groups(data, groups),
        whole_epochs=end.get("whole_epochs", 0),
        dropped_rows=dropped_rows,
    )


def verify_ledger(
    directory: Path,
    data: DataPath,
    *,
    quarantined: frozenset[int] = frozenset(),
    whole_epochs: int = 0,
    dropped_rows: int = 0,
) -> LedgerReport:
    """Compare the ledger of a run with the sample ids of its training split, epoch by epoch.

    quarantined: ids that a finished epoch may lack. Left-out steps (trained False) count as accounted for.
    whole_epochs: how many epochs are known to be finished; of others, the last counts as such where it lacks nothing.
    dropped_rows: how many rows (a request is one, with all of its ids) every epoch leaves out. Which, is not known: an
    epoch that lacks so many or fewer, each whole, has lost none; of one that lacks more, all are named.

    Raises RunError where the ledger does not begin with the run.
    """
    ledger = read_ledger(directory)
    first = _first_step(_segments(directory)[0][1], ledger)
    if first > 1:
        raise RunError(
            f"{directory} begins at step {first}: --train.ledger True came later, or earlier segments were removed; "
            "what was trained before is not known"
        )
    wanted, rows = _sample_ids(data)
    twice: list[int] = []
    lost: list[int] = []
    epochs = max(whole_epochs, int(ledger["epoch"].max(initial=-1)) + 1)
    complete = pending = dropped = 0
    for epoch in range(epochs):
        ids, counts = np.unique(ledger["sample_id"][ledger["epoch"] == epoch], return_counts=True)
        twice += ids[counts > 1].tolist()
        twice += np.setdiff1d(ids, wanted).tolist()
        absent = ~np.isin(wanted, ids) & ~np.isin(wanted, list(quarantined))
        missing = wanted[absent].tolist()
        meant = _are_few_and_whole(rows, absent, dropped_rows)
        finished = epoch < max(whole_epochs, epochs - 1) or meant
        complete += finished
        if not finished:
            pending = len(missing)
        elif meant:
            dropped += len(missing)
        else:
            lost += missing
    return LedgerReport(
        steps=int(ledger["step"].max(initial=0)),
        trained=int(ledger["trained"].sum()),
        skipped=int((ledger["trained"] == 0).sum()),
        complete=complete,
        pending=pending,
        dropped=dropped,
        twice=tuple(twice),
        lost=tuple(lost),
    )


def _are_few_and_whole(rows: Int64, absent: npt.NDArray[np.bool_], most: int) -> bool:
    """Whether the samples marked are at most `most` rows, and of none of these rows a part only. rows: of each."""
    of_absent = np.unique(rows[absent])
    return len(of_absent) <= most and int(np.isin(rows, of_absent).sum()) == int(absent.sum())


def _sample_ids(data: DataPath) -> tuple[Int64, Int64]:
    """(ids in ascending order, the number of the row that each is in) of the training split."""
    ids: list[Int64] = []
    rows: list[Int64] = []
    before = 0
    for file in read_schema(data).files:
        if file.split == "train":
            found, inside = _read_ids(data / file.path)
            ids.append(found)
            rows.append(inside + before)
            before += file.rows
    whole, first = np.unique(np.concatenate(ids), return_index=True)
    return whole, np.concatenate(rows)[first]


def _first_step(path: Path, ledger: dict[str, Int64]) -> int:
    """The first step that the first segment is about: noted, or else of its first row; 0 where there is none."""
    noted = (pq.read_schema(path).metadata or {}).get(_FIRST)
    return int(ledger["step"][:1].sum()) if noted is None else int(noted)


def _ids_of_groups(data: DataPath, groups: Sequence[dict[str, Any]]) -> frozenset[int]:
    """The sample ids of row groups of "quarantine" records; row_group None: of the whole file."""
    found: set[int] = set()
    for group in groups:
        if group["file"] is not None:
            found.update(_read_ids(data / group["file"], group["row_group"])[0].tolist())
    return frozenset(found)


def _read_ids(path: DataPath, row_group: int | None = None) -> tuple[Int64, Int64]:
    """(sample ids, the row of each), of one row group or all."""
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as parquet:
            groups = range(parquet.num_row_groups) if row_group is None else [row_group]
            column = parquet.read_row_groups(list(groups), columns=["sample_id"]).column(0)
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{path}: the sample ids, which the ledger is compared with, cannot be read: {error}") from None
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return pc.list_flatten(column).to_numpy(), pc.list_parent_indices(column).to_numpy()
    return column.to_numpy(), np.arange(len(column))


def _segments(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = [(_SEGMENT.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def _write_segment(directory: Path, first: int, step: int, rows: Int64) -> None:
    if not directory.is_dir():
        directory.mkdir()
        sync_directory(directory.parent)  # or a loss of power takes the directory, and with it all segments
    columns = {name: pa.array(rows[:, number]) for number, name in enumerate(_COLUMNS)}
    columns["trained"] = columns["trained"].cast(pa.bool_())
    target = directory / f"step-{step:08d}.parquet"
    temporary = directory / f".{target.name}.{os.getpid()}"
    with open(temporary, "wb") as file:
        table = pa.table(columns, metadata={_FIRST: str(first).encode()})
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
    sync_directory(directory)
