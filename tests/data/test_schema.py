"""schema.json: what was written is read back, and every slip is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from gem_data.api import read_schema, schema_from_dict, schema_to_dict
from gem_data.interface import DataError, FileInfo
from gem_data.testing import tiny_schema, write_tiny


def plain() -> dict[str, Any]:
    return json.loads(json.dumps(schema_to_dict(tiny_schema())))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = write_tiny(tmp_path / "d")
    assert read_schema(tmp_path / "d") == written
    assert [(file.path, file.split, file.rows) for file in written.files] == [
        ("train-00000.parquet", "train", 45),
        ("train-00001.parquet", "train", 45),
        ("train-00002.parquet", "train", 10),
        ("eval-00000.parquet", "eval", 30),
    ]


def test_the_plain_form_needs_no_files_nor_version() -> None:
    content = dataclasses.asdict(tiny_schema())
    del content["files"]
    assert schema_from_dict(content) == tiny_schema()
    assert schema_from_dict(plain()) == tiny_schema()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(tabels=[]), r'unknown key "tabels" \(did you mean "tables"\?\)'),
        (
            lambda s: s["streams"][0].update(max_len=3),
            r'streams\[0\]: unknown key "max_len" \(did you mean "max_length"',
        ),
        (lambda s: s.pop("labels"), 'the key "labels" is missing'),
        (lambda s: s["tables"][1].pop("rows"), r'tables\[1\]: the key "rows" is missing'),
        (lambda s: s["tables"][0].update(rows="20"), r'tables\[0\].rows: expected a whole number, came str "20"'),
        (lambda s: s["tables"][0].update(rows=True), r"tables\[0\].rows: expected a whole number, came bool true"),
        (lambda s: s["labels"][0].update(weighted=1), r"labels\[0\].weighted: expected true or false, came int 1"),
        (lambda s: s.update(dense="price"), 'dense: expected a list, came str "price"'),
        (lambda s: s.update(facts=[1]), "facts: expected an object"),
        (lambda s: s["scalars"].append(3), r"scalars\[2\]: expected an object, came int 3"),
        (lambda s: s["tables"][0].update(rows=0), "rows of user: expected 1 to"),
        (lambda s: s["streams"][0].update(action_bits=63), "views: action_bits: expected 0 to 62, came 63"),
        (lambda s: s["streams"][0].update(max_length=0), "views: max_length: expected 1 to"),
        (lambda s: s["scalars"][0].update(table="usr"), r'"user" names table "usr".*did you mean "user"'),
        (lambda s: s["streams"][0]["fields"][0].update(table="itm"), r'views.*"itm".*did you mean "item"'),
        (lambda s: s["streams"][0]["fields"][0].update(name="time"), 'may not be called "time"'),
        (lambda s: s["streams"][0].update(fields=[]), "expected at least one field"),
        (lambda s: s["lists"][0].update(name="user"), '"user" comes twice'),
        (lambda s: s["lists"][0].update(name="a.b"), 'came "a.b"'),
        (lambda s: s.update(labels=[]), "labels: expected at least one task"),
        (lambda s: s.update(interface_version=[9, 0]), "came 9"),
        (lambda s: s.update(interface_version="1.0"), r"expected \[major, minor\]"),
        (lambda s: s.update(files=[{"path": "../x", "split": "train", "rows": 1}]), "inside the data set"),
        (lambda s: s.update(files=[{"path": "/x", "split": "train", "rows": 1}]), "inside the data set"),
        (lambda s: s.update(files=[{"path": "x", "split": "test", "rows": 1}]), 'came "test"'),
        (lambda s: s.update(files=[{"path": "x", "split": "eval", "rows": -1}]), "rows of x: expected 0"),
        (
            lambda s: s.update(files=[{"path": "x", "split": "eval", "rows": 1, "xxh3": "0123456789ABCDEF"}]),
            'xxh3 of x: expected 16 hexadecimal digits or nothing, came "0123456789ABCDEF"',
        ),
    ],
)
def test_slips_are_named(change: Any, message: str) -> None:
    content = plain()
    change(content)
    with pytest.raises(DataError, match=message) as caught:
        schema_from_dict(content, source="dir/schema.json")
    assert str(caught.value).startswith("dir/schema.json: ")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file.*gemline data prepare"):
        read_schema(tmp_path)
    path = tmp_path / "schema.json"
    for content in (b"{", b"", b"\xff\xfe", b"[" * 200_000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"schema\.json"):
            read_schema(tmp_path)
    path.write_text("[]")
    with pytest.raises(DataError, match="expected a JSON object, came list"):
        read_schema(tmp_path)


def test_id_features_are_in_key_order() -> None:
    assert tiny_schema().id_features() == (
        ("user", "user"),
        ("item", "item"),
        ("genres", "genre"),
        ("views.item", "item"),
        ("views.genre", "genre"),
        ("buys.item", "item"),
    )


def test_facts_and_files_survive(tmp_path: Path) -> None:
    schema = dataclasses.replace(
        tiny_schema(),
        facts={"best_ne": 0.5, "nested": {"a": [1, None]}},
        files=(FileInfo(path="a/b.parquet", split="eval", rows=3, xxh3="0123456789abcdef"),),
    )
    assert schema_from_dict(json.loads(json.dumps(schema_to_dict(schema)))) == schema
