"""Generating the synthetic data set: every option at its default but the size."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases.case import Case
from cases.memory import count_all

ROWS = 2000
HASHES = {
    "train": {
        "sample_id": "203b90705361c5e9",
        "user_id": "a24d6b20d195493b",
        "timestamp": "cc09d8e0f08bb0b3",
        "label.click": "4b305a1d8c47f5b5",
        "label.conversion": "6e1fa9bc37640eee",
        "weight.conversion": "e89496718690f270",
        "id.profile": "ae11ff06b22fbe9a",
        "id.item": "a819d62482ab0100",
        "id.campaign": "feff0235d56b8e5c",
        "id.topic": "83f3c8b37da1e16e",
        "id.placement": "d18060496cfebf27",
        "id.hour": "adb13286b62bf066",
        "ids.interests": "40f0c09433862e7e",
        "dense.price": "8c4b80af6fe15a5c",
        "dense.quality": "7919f089863b978c",
        "dense.bid": "f609a9db29d0b824",
        "dense.noise": "40b09828dc7b86c0",
        "dense.events": "2f70603a55dafde3",
        "stream.organic.item": "3992ccbd1b32a30b",
        "stream.organic.topic": "6c3984df049ade62",
        "stream.organic.action": "8c23e818e60c8718",
        "stream.organic.time": "85ed540e19b67403",
        "stream.ads.item": "2b8e129eab3df760",
        "stream.ads.topic": "440631ec4f39a585",
        "stream.ads.action": "e71ff24a77115f50",
        "stream.ads.time": "a074f279be171104",
        "stream.search.item": "4b95a6dae47dbe50",
        "stream.search.topic": "620b67ebb9a607cc",
        "stream.search.action": "33afc45274a3e1a7",
        "stream.search.time": "98b6028584782d02",
    },
    "eval": {
        "sample_id": "0cefb334dd81612e",
        "user_id": "a3dffa6121fb1cc1",
        "timestamp": "5ee1ec63d7d9d9d9",
        "label.click": "1b9e4af215076386",
        "label.conversion": "32ad0f1f54a52ab3",
        "weight.conversion": "a4ee5b67727e9ba8",
        "id.profile": "82c49c6a1136c145",
        "id.item": "c58bb1633bbdaf26",
        "id.campaign": "d08156ff5393d14c",
        "id.topic": "e2431565b87bdc33",
        "id.placement": "1d7b4a2c5679f198",
        "id.hour": "46e2ca6c812d2eb0",
        "ids.interests": "41303b577f6dcce0",
        "dense.price": "cc51440166a2f176",
        "dense.quality": "293fc42c8e8753e1",
        "dense.bid": "d1248ae61a935491",
        "dense.noise": "8190b1d1ed754aa6",
        "dense.events": "528de337af423082",
        "stream.organic.item": "ed0db93ae93be909",
        "stream.organic.topic": "93bfec95dc3dddf6",
        "stream.organic.action": "336498d8edb5a1fe",
        "stream.organic.time": "4651b90f2ab02b02",
        "stream.ads.item": "81d1a95f69b3d49e",
        "stream.ads.topic": "cc90e1d815c7ec03",
        "stream.ads.action": "4ac9d2b8b99393ef",
        "stream.ads.time": "37d198bdf45dfd5a",
        "stream.search.item": "9b3ba4a1262993f3",
        "stream.search.topic": "70e2cc9b9a5af7fe",
        "stream.search.action": "aad765c38d1e57cf",
        "stream.search.time": "691f9c53c4eda5cd",
    },
}


def run(options: dict[str, Any]) -> Any:
    import gem_datasets

    return gem_datasets.load("synthetic", **options)


def column_hashes(table: Any) -> dict[str, str]:
    """Column -> a hash of its type, values and (of lists) lengths."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import xxhash

    found = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        digest = xxhash.xxh3_64(str(column.type).encode())
        if pa.types.is_list(column.type):
            digest.update(np.asarray(pc.list_value_length(column), np.int64).tobytes())
            column = column.flatten()
        digest.update(column.to_numpy(zero_copy_only=False).tobytes())
        found[name] = digest.hexdigest()
    return found


def check(options: dict[str, Any], data: Any) -> None:
    """The rows of this seed, column by column; and the promised split, with histories strictly earlier than their row.

    The hashes are of what seed 1 has always given: a change of the generated data must change them, and be meant.
    """
    assert data.train.num_rows + data.eval.num_rows == ROWS
    assert max(data.train.column("timestamp").to_pylist()) < min(data.eval.column("timestamp").to_pylist())
    for row in data.eval.slice(0, 100).to_pylist():
        for stream in data.schema["streams"]:
            names = [key for key in row if key.startswith(f"stream.{stream['name']}.")]
            assert len({len(row[name]) for name in names}) == 1
            assert all(time < row["timestamp"] for time in row[f"stream.{stream['name']}.time"])
    for split, table in (("train", data.train), ("eval", data.eval)):
        for stream in data.schema["streams"]:
            times = table.column(f"stream.{stream['name']}.time").combine_chunks()
            assert len(times.flatten()) > len(table), f"{split}: stream {stream['name']} has not one event a row"
        found, wanted = column_hashes(table), HASHES[split]
        other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        assert not other, f"{split}: not the columns of this seed: {', '.join(other)}"


CASES = (
    Case(
        name="datasets.synthetic_ragged",
        make=partial(dict, rows=ROWS, users=200, items=500, seed=1),
        run=run,
        check=check,
        count=count_all,
        repeat=40,
    ),
)
