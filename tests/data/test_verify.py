"""verify lists everything that is wrong; inspect counts what is there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from gem_data import verify
from gem_data.api import inspect_dataset, verify_dataset, write_dataset
from gem_data.damage import rewrite, set_value
from gem_data.interface import DataError
from gem_data.testing import DAMAGES, damage, tiny_schema, tiny_table, write_tiny


def test_good_data_has_no_problem(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    report = verify_dataset(tmp_path / "d")
    assert (report.ok, report.problems, report.warnings, report.cut) == (True, (), (), False)
    assert (report.rows, report.files, report.row_groups) == ({"train": 100, "eval": 30}, 4, 16)
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "d").glob("*.parquet"))
    assert str(report).endswith("\nok")


@pytest.mark.parametrize("entry", [d for d in DAMAGES if d.file != "schema.json"], ids=lambda entry: entry.kind)
def test_every_damage_is_found_where_it_is(tmp_path: Path, entry: Any) -> None:
    write_tiny(tmp_path / "d")
    damage(tmp_path / "d", entry.kind)
    report = verify_dataset(tmp_path / "d")
    assert not report.ok
    problem = report.problems[0]
    wanted = (entry.file, entry.row_group, entry.row, entry.column)
    assert (problem.file, problem.row_group, problem.row, problem.column) == wanted
    # The other files are still read.
    assert report.rows["eval"] == 30


def test_a_file_of_another_content_is_found(tmp_path: Path) -> None:
    """Every rule holds in the changed file, and its pages have their checksums: only the hash tells."""
    schema = write_tiny(tmp_path / "d")
    path = tmp_path / "d" / "train-00001.parquet"
    rewrite(path, lambda table: set_value(table, 3, "dense.hour", 0.5))
    (problem,) = verify_dataset(tmp_path / "d").problems
    assert problem.file == "train-00001.parquet"
    found = xxhash.xxh3_64_hexdigest(path.read_bytes())
    assert f"expected xxh3 {schema.files[1].xxh3} (schema.json), came {found}" in str(problem)


def test_files_without_a_hash_are_warned_of(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    path = tmp_path / "d" / "schema.json"
    content = json.loads(path.read_text())
    for file in content["files"][:2]:
        del file["xxh3"]
    path.write_text(json.dumps(content))
    report = verify_dataset(tmp_path / "d")
    assert report.ok
    assert [warning.split(":")[0] for warning in report.warnings] == ["train-00000.parquet", "train-00001.parquet"]
    assert "no xxh3 in schema.json" in report.warnings[0]


def test_an_unreadable_schema_raises(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    damage(tmp_path / "d", "misspelt key")
    with pytest.raises(DataError, match="max_lenght"):
        verify_dataset(tmp_path / "d")


def test_all_problems_are_listed_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_PROBLEMS", 5)
    write_tiny(tmp_path / "d", rows_per_file=1000, rows_per_group=1, train_rows=8)

    def spoil(table: Any) -> Any:
        for row in (3, 5):
            table = set_value(table, row, "label.click", 2.0)
        return set_value(table, 5, "id.item", -4)

    rewrite(tmp_path / "d" / "train-00000.parquet", spoil)
    report = verify_dataset(tmp_path / "d")
    assert [(p.row_group, p.column) for p in report.problems] == [
        (3, "label.click"),
        (5, "label.click"),
        (5, "id.item"),
        (None, None),  # the file's hash
    ]
    rewrite(
        tmp_path / "d" / "train-00000.parquet",
        lambda table: table.set_column(3, "label.click", [np.full(8, 9, np.float32)]),
    )
    report = verify_dataset(tmp_path / "d")
    assert (len(report.problems), report.cut) == (5, True)
    assert "only the first 5 problems" in str(report)


def test_evaluation_must_be_later_than_training(tmp_path: Path) -> None:
    train, later = tiny_table(rows=20, seed=0), tiny_table(rows=5, seed=0, first_sample=20, start=1_000_190)
    write_dataset(tmp_path / "d", tiny_schema(), {"train": train, "eval": later})
    report = verify_dataset(tmp_path / "d")
    (problem,) = report.problems
    assert "expected every timestamp later than the last of train (1000190), came 1000190" in str(problem)


def test_repeated_sample_ids_are_found_across_files(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    rewrite(tmp_path / "d" / "train-00001.parquet", lambda table: set_value(table, 11, "sample_id", 20))
    changed, problem = verify_dataset(tmp_path / "d").problems
    assert "xxh3" in str(changed)
    assert (problem.file, problem.row_group, problem.row) == ("train-00001.parquet", 1, 2)
    assert "came 20, which train-00000.parquet, row group 2, row 2 has too (1 rows repeat one)" in str(problem)


def test_stray_files_are_warned_of(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    (tmp_path / "d" / "train-00009.parquet").write_bytes(b"")
    report = verify_dataset(tmp_path / "d")
    assert report.ok
    assert report.warnings == ("train-00009.parquet: not named in schema.json, so it is never read.",)


def test_inspect_counts_what_is_there(tmp_path: Path) -> None:
    schema = write_tiny(tmp_path / "d")
    found = inspect_dataset(tmp_path / "d")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found["splits"]) == ["train", "eval"]
    files = [file.path for file in schema.files if file.split == "train"]
    rows = [row for path in files for row in pq.read_table(tmp_path / "d" / path).to_pylist()]
    train = found["splits"]["train"]
    assert (train["rows"], train["files"], train["row_groups"]) == (100, 3, 12)
    assert train["users"] == len({row["user_id"] for row in rows})
    assert train["time"] == {"first": 1_000_000, "last": 1_000_990}
    assert train["labels"]["click"]["rate"] == sum(row["label.click"] for row in rows) / 100
    weights = [row["weight.like"] for row in rows]
    weighted = sum(row["label.like"] * row["weight.like"] for row in rows)
    assert math.isclose(train["labels"]["like"]["rate"], weighted / sum(weights), rel_tol=1e-12)
    lengths = sorted(len(row["stream.views.time"]) for row in rows)
    views = train["streams"]["views"]
    assert (views["total"], views["mean"]) == (sum(lengths), sum(lengths) / 100)
    assert views["cut_rows"] == sum(length > 12 for length in lengths)
    assert views["quantiles"]["0.5"] == (lengths[49] + lengths[50]) / 2
    items = {row["id.item"] for row in rows}
    for stream in ("views", "buys"):
        items |= {item for row in rows for item in row[f"stream.{stream}.item"]}
    assert train["tables"]["item"] == len(items)
    prices = [row["dense.price"] for row in rows]
    assert train["dense"]["price"]["min"] == min(prices)
    assert train["lists"]["genres"]["total"] == sum(len(row["ids.genres"]) for row in rows)


def test_inspect_checks_values_where_asked(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    assert inspect_dataset(tmp_path / "d", check=True) == inspect_dataset(tmp_path / "d")
    damage(tmp_path / "d", "label 7")
    assert inspect_dataset(tmp_path / "d")["splits"]["train"]["rows"] == 100
    with pytest.raises(DataError, match=r"row 4 \(sample_id 22\), column label\.like: expected 0 or 1, came 7\.0"):
        inspect_dataset(tmp_path / "d", check=True)
