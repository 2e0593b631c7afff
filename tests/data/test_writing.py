"""Writing: whole or not at all, checked before it is written, checksummed, in the promised groups and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from gem_data.api import build_loader, read_schema, schema_to_dict, verify_dataset, write_dataset
from gem_data.damage import set_value
from gem_data.interface import DataError, LoaderConfig
from gem_data.testing import tiny_schema, tiny_table, write_tiny


def test_groups_and_files_have_the_asked_rows(tmp_path: Path) -> None:
    table = tiny_table(rows=100, seed=0)
    pieces = [table.slice(0, 1), table.slice(1, 30), table.slice(31, 0), table.slice(31)]
    schema = write_dataset(tmp_path / "d", tiny_schema(), {"train": iter(pieces)}, rows_per_file=40, rows_per_group=16)
    assert [file.rows for file in schema.files] == [48, 48, 4]
    groups = [pq.read_metadata(tmp_path / "d" / file.path) for file in schema.files]
    assert [[m.row_group(g).num_rows for g in range(m.num_row_groups)] for m in groups] == [[16] * 3, [16] * 3, [4]]
    read = pa.concat_tables([pq.read_table(tmp_path / "d" / file.path) for file in schema.files])
    assert read.to_pylist() == table.to_pylist()


def test_schema_json_names_the_hash_of_every_file(tmp_path: Path) -> None:
    schema = write_tiny(tmp_path / "d")
    assert len(schema.files) == 4
    assert read_schema(tmp_path / "d") == schema
    for file in schema.files:
        assert file.xxh3 == xxhash.xxh3_64_hexdigest((tmp_path / "d" / file.path).read_bytes())


def test_default_groups_decode_to_about_8_mib(tmp_path: Path) -> None:
    table = tiny_table(rows=2000, seed=0)
    big = pa.concat_tables([table] * 10)
    big = big.set_column(0, "sample_id", pa.array(range(20000)))
    schema = write_dataset(tmp_path / "d", tiny_schema(), {"train": big})
    metadata = pq.read_metadata(tmp_path / "d" / schema.files[0].path)
    rows = metadata.row_group(0).num_rows
    assert 6 << 20 < rows * big.nbytes / big.num_rows <= 8 << 20


def test_a_mapping_serves_as_schema_and_columns_are_put_in_order(tmp_path: Path) -> None:
    table = tiny_table(rows=10, seed=0)
    shuffled = table.select(table.column_names[::-1])
    content = schema_to_dict(tiny_schema())
    write_dataset(tmp_path / "d", content, {"train": shuffled})
    assert pq.read_schema(tmp_path / "d" / "train-00000.parquet").names == table.column_names
    assert verify_dataset(tmp_path / "d").ok


@pytest.mark.parametrize("kind", [pa.large_list(pa.int64()), pa.list_(pa.field("x", pa.int64(), nullable=False))])
def test_other_list_forms_are_written_as_the_layout_has_them(tmp_path: Path, kind: pa.DataType) -> None:
    table = tiny_table(rows=10, seed=0)
    fields = [pa.field(f.name, kind if pa.types.is_list(f.type) else f.type) for f in table.schema]
    write_dataset(
        tmp_path / "d", tiny_schema(), {"train": iter([table.slice(0, 4), table.slice(4).cast(pa.schema(fields))])}
    )
    read = pq.read_table(tmp_path / "d" / "train-00000.parquet")
    assert read.to_pylist() == table.to_pylist()
    assert not any(field.nullable for field in read.schema)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("label.click", 7.0, "train table, row 17 (sample_id 17), column label.click: expected 0 or 1, came 7.0"),
        ("id.item", 50, "column id.item: expected an id with 0 <= id < 50 (table item), came id 50"),
        (
            "id.item",
            None,
            "train table, row 17 (sample_id 17), column id.item: expected a value in every row, came null",
        ),
        ("stream.buys.time", [10**7], "column stream.buys."),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_left(tmp_path: Path, column: str, value: object, message: str) -> None:
    table = set_value(tiny_table(rows=30, seed=0), 17, column, value)
    with pytest.raises(DataError) as caught:
        write_dataset(
            tmp_path / "d", tiny_schema(), {"train": iter([table.slice(0, 9), table.slice(9)])}, rows_per_group=8
        )
    assert message in str(caught.value)
    assert caught.value.row == 17
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked(tmp_path: Path) -> None:
    table = tiny_table(rows=5, seed=0)
    with pytest.raises(ValueError, match=r'came "trian" \(did you mean "train"\?\)'):
        write_dataset(tmp_path / "d", tiny_schema(), {"trian": table})
    with pytest.raises(ValueError, match="rows_per_group: expected at least 1, came 0"):
        write_dataset(tmp_path / "d", tiny_schema(), {"train": table}, rows_per_group=0)
    with pytest.raises(DataError, match="expected at least one row, came none"):
        write_dataset(tmp_path / "d", tiny_schema(), {"train": table.slice(0, 0)})
    with pytest.raises(DataError, match=r'column id.usr.*did you mean "id.user"'):
        write_dataset(tmp_path / "d", tiny_schema(), {"train": table.append_column("id.usr", table.column("id.user"))})
    with pytest.raises(DataError, match=r"column dense\.hour: expected a column of type float"):
        write_dataset(tmp_path / "d", tiny_schema(), {"train": table.drop_columns(["dense.hour"])})
    assert list(tmp_path.iterdir()) == []


def test_existing_data_is_kept_unless_asked(tmp_path: Path) -> None:
    old = write_tiny(tmp_path / "d")
    table = tiny_table(rows=5, seed=1)
    with pytest.raises(ValueError, match="overwrite=True"):
        write_dataset(tmp_path / "d", tiny_schema(), {"train": table})
    bad = set_value(table, 2, "label.click", 7.0)
    with pytest.raises(DataError):
        write_dataset(tmp_path / "d", tiny_schema(), {"train": bad}, overwrite=True)
    assert read_schema(tmp_path / "d") == old
    new = write_dataset(tmp_path / "d", tiny_schema(), {"train": table}, overwrite=True)
    assert read_schema(tmp_path / "d") == new
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["schema.json", "train-00000.parquet"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no data set and will not be overwritten"):
        write_dataset(tmp_path / "other", tiny_schema(), {"train": table}, overwrite=True)


def test_nothing_is_seen_under_the_name_before_all_is_written(tmp_path: Path) -> None:
    seen = []

    def tables() -> Iterator[pa.Table]:
        yield tiny_table(rows=50, seed=0)
        seen.extend(path.name for path in tmp_path.iterdir())
        yield tiny_table(rows=50, seed=0, first_sample=50)

    write_dataset(tmp_path / "d", tiny_schema(), {"train": tables()}, rows_per_group=8, rows_per_file=8)
    assert len(seen) == 1
    assert seen[0].startswith(".d.writing-")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.slow
def test_a_killed_writer_leaves_no_data_set(tmp_path: Path) -> None:
    code = f"""
import os, signal
from gem_data.api import write_dataset
from gem_data.testing import tiny_schema, tiny_table
def tables():
    yield tiny_table(rows=50, seed=0)
    os.kill(os.getpid(), signal.SIGKILL)
write_dataset({str(tmp_path / "d")!r}, tiny_schema(), {{"train": tables()}}, rows_per_group=8)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "d").exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_written_pages_are_checksummed(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    assert verify_dataset(tmp_path / "d").warnings == ()
    table = pq.read_table(tmp_path / "d" / "eval-00000.parquet")
    pq.write_table(table, tmp_path / "d" / "eval-00000.parquet", row_group_size=9)
    report = verify_dataset(tmp_path / "d")
    assert [(problem.file, "xxh3" in str(problem)) for problem in report.problems] == [("eval-00000.parquet", True)]
    assert report.warnings == (
        "eval-00000.parquet: pages without checksums: a flipped bit would pass unnoticed. Write it again.",
    )


def test_what_was_written_loads(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", tiny_schema(), {"eval": tiny_table(rows=7, seed=0)})
    loader = build_loader(tmp_path / "d", split="eval", config=LoaderConfig(global_batch_size=7, shuffle=False))
    assert next(loader.epoch()).sample_ids.tolist() == list(range(7))
    with pytest.raises(DataError, match=r'expected files of split "train", came files of \[\'eval\'\]'):
        build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=7))
