"""verify_dataset: reads every page of every file and lists all that is wrong, instead of stopping at the first.

Beyond what reading checks (schema, types, nulls, checksums, ranges, list lengths, history strictly earlier) it checks
what only a full pass can: sample ids unique over the data set, evaluation strictly later than training, no Parquet
file that schema.json does not name, that each file is the one that was written (its hash is that of schema.json; data
written before 1.1 have none, which is a warning), and that pages carry checksums at all (a warning: such data reads,
but a flipped bit in it would pass unnoticed). pyarrow does not say whether a page has a checksum, so the first page
header of every column chunk is looked at here: the Parquet format puts four integers at its start, the fourth being the
CRC.

Cost: one pass of decoding and one of hashing; 8 bytes a sample are held for the sample ids, of requests 16.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gem_data.hashing import file_hash
from gem_data.interface import DataError, FileInfo, Schema
from gem_data.remote import ReadError, RemotePath, data_path
from gem_data.rows import Int64, Rows, Where
from gem_data.schema import SCHEMA_FILE, read_schema
from gem_data.shards import Footer, Shards
from gem_data.validation import find_problems

MAX_PROBLEMS = 100


@dataclass(frozen=True, kw_only=True)
class Report:
    """What verify_dataset found. `ok` when there is no problem; warnings do not count.

    problems   at most MAX_PROBLEMS DataErrors; `cut` says whether there were more
    warnings   texts
    rows       rows read per split; row_groups, files, bytes over all splits
    impressions  of each split whose rows are requests
    """

    directory: str
    rows: dict[str, int]
    row_groups: int
    files: int
    bytes: int
    problems: tuple[DataError, ...]
    warnings: tuple[str, ...]
    cut: bool
    seconds: float
    impressions: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems

    def __str__(self) -> str:
        rows = ", ".join(f"{count} {split}" for split, count in self.rows.items())
        rows += " rows"
        if self.impressions:
            rows += f" ({', '.join(f'{count} {split}' for split, count in self.impressions.items())} impressions)"
        lines = [
            f"{self.directory}: {rows} in {self.files} files, {self.row_groups} row groups, "
            f"{self.bytes / 1e6:.1f} MB, read in {self.seconds:.1f} s"
        ]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.cut:
            lines.append(f"(only the first {MAX_PROBLEMS} problems are listed)")
        lines.append("ok" if self.ok else f"{len(self.problems)} problems")
        return "\n".join(lines)


@dataclass
class _Totals:
    """What the pass gathers."""

    rows: dict[str, int]
    row_groups: int
    bytes: int
    sample_ids: list[Int64]
    places: list[tuple[Where, int]]  # place and first index of every decoded row group
    decoded: int
    impressions: dict[str, int]
    spans: dict[str, tuple[int, int]]  # earliest and latest timestamp per split


def verify_dataset(directory: str | Path | RemotePath) -> Report:
    """Check everything. Problems are in the Report; only an unreadable schema.json raises DataError."""
    started = time.perf_counter()
    directory = data_path(directory)
    schema = read_schema(directory)
    totals = _Totals(rows={}, row_groups=0, bytes=0, sample_ids=[], places=[], decoded=0, impressions={}, spans={})
    problems: list[DataError] = []
    warnings = list(_stray_files(directory, schema))
    cut = False
    for problem in _all_problems(directory, schema, totals, warnings):
        if len(problems) == MAX_PROBLEMS:
            cut = True
            break
        problems.append(problem)
    return Report(
        directory=str(directory),
        rows=totals.rows,
        row_groups=totals.row_groups,
        files=len(schema.files),
        bytes=totals.bytes,
        problems=tuple(problems),
        warnings=tuple(warnings),
        cut=cut,
        impressions=totals.impressions,
        seconds=time.perf_counter() - started,
    )


def _all_problems(
    directory: Path | RemotePath, schema: Schema, totals: _Totals, warnings: list[str]
) -> Iterator[DataError]:
    if not schema.files:
        yield DataError(f"{SCHEMA_FILE}: files: expected at least one file, came none. Prepare it again.")
    for number, info in enumerate(schema.files, start=1):
        try:
            yield from _file_problems(directory, schema, info, totals, warnings)
        except OSError as error:
            place = getattr(error, "row_group", None)
            told = str(error) if isinstance(error, ReadError) and error.file else f"{info.path}: {error}"
            rest = "The rest of the file was not looked at."
            ends = isinstance(error, ReadError) and isinstance(directory, RemotePath)
            if ends and number < len(schema.files):
                # A store that does not answer would be waited for once more at every file.
                rest = f"The rest of the file, and {len(schema.files) - number} other files, were not looked at."
            yield DataError(f"{told} {rest}", file=info.path, row_group=place)
            if ends:
                break
    yield from _repeated_samples(totals)
    if "train" in totals.spans and "eval" in totals.spans:
        latest, earliest = totals.spans["train"][1], totals.spans["eval"][0]
        if earliest <= latest:
            yield DataError(
                f"eval: expected every timestamp later than the last of train ({latest}), came {earliest}. "
                "Split by time: evaluating on the past tells what the model has seen.",
                column="timestamp",
            )


def _file_problems(
    directory: Path | RemotePath, schema: Schema, info: FileInfo, totals: _Totals, warnings: list[str]
) -> Iterator[DataError]:
    try:
        shards = Shards(directory, dataclasses.replace(schema, files=(info,)), info.split, compare=False)
    except DataError as problem:
        yield problem
        return
    footer = shards.footers[0]
    totals.bytes += footer.bytes
    if not pages_have_checksums(directory / info.path, footer):
        warnings.append(f"{info.path}: pages without checksums: a flipped bit would pass unnoticed. Write it again.")
    for group in range(len(footer.group_rows)):
        where = Where(file=info.path, row_group=group)
        totals.row_groups += 1
        try:
            rows = shards.read_unchecked(0, group)
        except DataError as problem:
            yield problem
            continue
        _count(rows, where, info.split, totals)
        yield from find_problems(schema, rows, where)
    yield from _hash_problems(directory, info, warnings)


def _hash_problems(directory: Path | RemotePath, info: FileInfo, warnings: list[str]) -> Iterator[DataError]:
    if not info.xxh3:
        warnings.append(
            f"{info.path}: no xxh3 in {SCHEMA_FILE}: other data of equal size and rows would pass unnoticed. "
            "Write it again."
        )
        return
    found = file_hash(directory / info.path)
    if found != info.xxh3:
        yield Where(file=info.path).error(
            expected=f"xxh3 {info.xxh3} ({SCHEMA_FILE})",
            came=found,
            todo="The file was changed after it was written: restore it, or prepare the data set again.",
        )


def _count(rows: Rows, where: Where, split: str, totals: _Totals) -> None:
    totals.rows[split] = totals.rows.get(split, 0) + len(rows)
    samples = rows if rows.inner is None else rows.inner
    if rows.bounds is not None:
        where = dataclasses.replace(where, owners=np.repeat(np.arange(len(rows)), np.diff(rows.bounds)))
        totals.impressions[split] = totals.impressions.get(split, 0) + len(samples)
    totals.places.append((where, totals.decoded))
    totals.sample_ids.append(samples.keys[0].copy())
    totals.decoded += len(samples)
    if len(rows):
        low, high = int(rows.keys[2].min()), int(rows.keys[2].max())
        before = totals.spans.get(split, (low, high))
        totals.spans[split] = (min(low, before[0]), max(high, before[1]))


def _repeated_samples(totals: _Totals) -> Iterator[DataError]:
    if not totals.sample_ids:
        return
    ids = np.concatenate(totals.sample_ids)
    order = np.argsort(ids, kind="stable")
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if again.size:
        place = int(again.min())
        first = int(np.flatnonzero(ids == ids[place])[0])
        (where, row), (other, other_row) = _place(totals, place), _place(totals, first)
        other_row = other_row if other.owners is None else int(other.owners[other_row])
        yield where.error(
            column="sample_id",
            row=row,
            expected="a number that no other row has",
            came=f"{int(ids[place])}, which {other.file}, row group {other.row_group}, row {other_row} has too "
            f"({again.size} rows repeat one)",
            todo="Number the rows anew where they are written.",
        )


def _place(totals: _Totals, index: int) -> tuple[Where, int]:
    starts = np.array([start for _, start in totals.places])
    group = int(np.searchsorted(starts, index, side="right")) - 1
    return totals.places[group][0], index - int(starts[group])


def _stray_files(directory: Path | RemotePath, schema: Schema) -> Iterator[str]:
    known = {info.path for info in schema.files}
    if isinstance(directory, RemotePath):
        found = list(directory.files_below(".parquet"))
    else:
        found = [path.relative_to(directory).as_posix() for path in directory.rglob("*.parquet")]
    for name in sorted(found):
        if name not in known:
            yield f"{name}: not named in {SCHEMA_FILE}, so it is never read."


def pages_have_checksums(path: Path | RemotePath, footer: Footer) -> bool:
    """Whether the first page of every column chunk carries a CRC."""
    with path.open("rb") as file:
        for group in range(footer.metadata.num_row_groups):
            for index in range(footer.metadata.num_columns):
                chunk = footer.metadata.row_group(group).column(index)
                start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                file.seek(start)
                if not _header_has_checksum(file.read(32)):
                    return False
    return True


def _header_has_checksum(header: bytes) -> bool:
    """Whether a page header (Thrift, compact protocol) starts with the integers 1, 2, 3 and 4, the fourth being crc.

    A field is one byte, (step of the field number) << 4 | type with type 5 for a 32-bit integer, and a varint.
    """
    position = 0
    for _ in range(4):
        if position >= len(header) or header[position] != 0x15:
            return False
        position += 1
        while position < len(header) and header[position] & 0x80:
            position += 1
        position += 1
    return True
