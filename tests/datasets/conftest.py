"""Fixture data sets, and a check of what every data set promises."""

from __future__ import annotations

from pathlib import Path

import gem_datasets
import numpy as np
import pyarrow as pa
import pytest

FIXTURES = Path(__file__).parents[2] / "datasets" / "fixtures"


@pytest.fixture
def fixture_folder():
    return FIXTURES


@pytest.fixture(scope="session")
def movielens():
    """The self-made MovieLens fixture: 30 events, six sessions with shared seconds."""
    return gem_datasets.load("ml-100k", source_dir=FIXTURES / "ml-100k", known_after=2, max_length=4, audience_length=3)


@pytest.fixture(scope="session")
def openbandit():
    """The self-made Open Bandit fixture: 2 x 15 impressions of campaign men."""
    return gem_datasets.load("openbandit", source_dir=FIXTURES / "openbandit", campaign="men", max_length=3)


def promised_columns(schema):
    """Column name -> Arrow type, from the schema alone (the native layout's own words)."""
    wanted = {name: pa.int64() for name in ("sample_id", "user_id", "timestamp")}
    for label in schema["labels"]:
        wanted[f"label.{label['name']}"] = pa.float32()
        if label["weighted"]:
            wanted[f"weight.{label['name']}"] = pa.float32()
    wanted |= {f"id.{entry['name']}": pa.int64() for entry in schema["scalars"]}
    wanted |= {f"ids.{entry['name']}": pa.list_(pa.int64()) for entry in schema["lists"]}
    wanted |= {f"dense.{name}": pa.float32() for name in schema["dense"]}
    for stream in schema["streams"]:
        for name in [*(field["name"] for field in stream["fields"]), "action", "time"]:
            wanted[f"stream.{stream['name']}.{name}"] = pa.list_(pa.int64())
    return wanted


def check_ids(rows, schema, table):
    sizes = {entry["name"]: entry["rows"] for entry in schema["tables"]}
    used = set()
    for entry in schema["scalars"]:
        used.add(entry["table"])
        assert all(0 <= row[f"id.{entry['name']}"] < sizes[entry["table"]] for row in rows), entry
    for entry in schema["lists"]:
        used.add(entry["table"])
        assert all(0 <= i < sizes[entry["table"]] for row in rows for i in row[f"ids.{entry['name']}"]), entry
    for stream in schema["streams"]:
        for field in stream["fields"]:
            used.add(field["table"])
            column = f"stream.{stream['name']}.{field['name']}"
            assert all(0 <= i < sizes[field["table"]] for row in rows for i in row[column]), column
    assert used == set(sizes), "every table is used and every used table is declared"


def check_stream(rows, stream):
    prefix = f"stream.{stream['name']}."
    names = [*(field["name"] for field in stream["fields"]), "action", "time"]
    for row in rows:
        lengths = {len(row[prefix + name]) for name in names}
        assert len(lengths) == 1
        assert lengths.pop() <= stream["max_length"]
        times = row[prefix + "time"]
        assert times == sorted(times)
        assert not times or times[-1] < row["timestamp"], "histories are strictly earlier"
        assert all(0 <= mask < 2 ** stream["action_bits"] for mask in row[prefix + "action"])


@pytest.fixture(scope="session")
def check_native():
    """check_native(prepared): every promise of the native layout, row by row in plain Python."""

    def check(prepared):
        schema = prepared.schema
        assert set(schema) == {
            *("name", "created_by", "tables", "labels", "scalars", "lists", "dense", "streams", "facts"),
        }
        for table in (prepared.train, prepared.eval):
            assert {field.name: field.type for field in table.schema} == promised_columns(schema)
            assert table.num_rows > 0
            assert all(column.null_count == 0 for column in table.columns)
            rows = table.to_pylist()
            check_ids(rows, {**schema, "tables": schema["tables"]}, table)
            for stream in schema["streams"]:
                check_stream(rows, stream)
            for label in schema["labels"]:
                assert {row[f"label.{label['name']}"] for row in rows} <= {0.0, 1.0}
            for name in schema["dense"]:
                assert np.isfinite(table[f"dense.{name}"].to_numpy()).all()
            times = table["timestamp"].to_pylist()
            assert times == sorted(times)
        assert max(prepared.train["timestamp"].to_pylist()) < min(prepared.eval["timestamp"].to_pylist())
        samples = prepared.train["sample_id"].to_pylist() + prepared.eval["sample_id"].to_pylist()
        assert len(set(samples)) == len(samples)

    return check
