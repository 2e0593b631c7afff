"""Ways in which a Parquet file gets damaged, as functions of a file and a random generator (procedure D2).

A mutant returns what was done, in words. Bytes are damaged as storage and people damage them; `rewritten` mutants are
well-formed Parquet with other content than schema.json promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

Mutant = Callable[[Path, random.Random], str]


def flip(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    bit = rng.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} flipped"


def flip_footer(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    bit = rng.randrange(8 * (len(data) - 8 - length), 8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"footer bit {bit} flipped"


def truncate(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    stop = rng.randrange(0, len(data), 1024)
    path.write_bytes(data[:stop])
    return f"cut at {stop}"


def zero_block(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    stop = min(start + rng.choice([8, 64, 512, 4096]), len(data))
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    return f"bytes {start}..{stop} zeroed"


def junk(path: Path, rng: random.Random) -> str:
    """A few bytes anywhere become random: lengths, offsets, encodings."""
    data = bytearray(path.read_bytes())
    places = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(1, 9)))
    for place in places:
        data[place] = rng.randrange(256)
    path.write_bytes(data)
    return f"bytes {places} random"


def swap_blocks(path: Path, rng: random.Random) -> str:
    """Two pieces of equal size change places, as misdirected writes leave them."""
    data = bytearray(path.read_bytes())
    size = rng.choice([16, 256, 1024])
    first, second = (rng.randrange(4, len(data) - size) for _ in range(2))
    one, two = bytes(data[first : first + size]), bytes(data[second : second + size])
    data[first : first + size], data[second : second + size] = two, one
    path.write_bytes(data)
    return f"{size} bytes at {first} and {second} changed places"


def wrong_magic(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    path.write_bytes(data[:-4] + rng.choice([b"PARE", b"PAR2", b"\0\0\0\0"]))
    return "wrong magic"


def huge_footer(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    length = rng.choice([2**31 - 1, 2**32 - 1, len(data), len(data) * 8])
    path.write_bytes(data[:-8] + length.to_bytes(4, "little") + b"PAR1")
    return f"footer length {length}"


def empty(path: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return "empty"


def directory(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a directory"


def grow(path: Path, rng: random.Random) -> str:
    """Something is appended: another footer, or rubbish."""
    data = path.read_bytes()
    path.write_bytes(data + rng.choice([data, rng.randbytes(100), b"PAR1"]))
    return "something appended"


def rewritten(change: Callable[[pa.Table, random.Random], pa.Table], name: str) -> Mutant:
    def mutate(path: Path, rng: random.Random) -> str:
        with pq.ParquetFile(path) as file:
            rows, table = file.metadata.row_group(0).num_rows, file.read()
        plain = pa.schema([pa.field(f.name, _loose(f.type)) for f in table.schema])
        pq.write_table(change(table.cast(plain), rng), path, row_group_size=rows, write_page_checksum=True)
        return name

    mutate.__name__ = name.replace(" ", "_")
    return mutate


def _loose(kind: pa.DataType) -> pa.DataType:
    return pa.list_(kind.value_type) if pa.types.is_list(kind) else kind


def _set(table: pa.Table, column: str, values: list, kind: pa.DataType) -> pa.Table:  # type: ignore[type-arg]
    return table.set_column(table.column_names.index(column), column, pa.array(values, kind))


def _missing(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.drop_columns([rng.choice(table.column_names)])


def _renamed(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice(table.column_names)
    return table.rename_columns([name + "x" if n == name else n for n in table.column_names])


def _narrow(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice([n for n in table.column_names if table.schema.field(n).type == pa.int64()])
    return table.set_column(table.column_names.index(name), name, table.column(name).cast(pa.int32()))


def _null_label(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice([n for n in table.column_names if n.startswith("label.")])
    values = table.column(name).to_pylist()
    values[rng.randrange(len(values))] = None
    return _set(table, name, values, table.schema.field(name).type)


def _null_in_list(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice([n for n in table.column_names if pa.types.is_list(table.schema.field(n).type)])
    values = table.column(name).to_pylist()
    values[rng.randrange(len(values))] = [None]
    return _set(table, name, values, table.schema.field(name).type)


def _nested(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice([n for n in table.column_names if pa.types.is_list(table.schema.field(n).type)])
    values = [[row] for row in table.column(name).to_pylist()]
    return _set(table, name, values, pa.list_(table.schema.field(name).type))


def _far_id(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice([n for n in table.column_names if n.startswith("id.")])
    values = table.column(name).to_pylist()
    values[rng.randrange(len(values))] = rng.choice([-1, 2**31, 2**63 - 1])
    return _set(table, name, values, pa.int64())


def _bad_label(table: pa.Table, rng: random.Random) -> pa.Table:
    name = rng.choice([n for n in table.column_names if n.startswith("label.")])
    values = table.column(name).to_pylist()
    values[rng.randrange(len(values))] = rng.choice([7.0, -1.0, float("nan"), float("inf")])
    return _set(table, name, values, table.schema.field(name).type)


def _one_group(table: pa.Table, rng: random.Random) -> pa.Table:
    return table.slice(0, table.num_rows - rng.randrange(1, 5))


BYTES: tuple[Mutant, ...] = (
    *(flip,) * 8,
    *(flip_footer,) * 4,
    *(truncate,) * 3,
    *(zero_block,) * 2,
    *(junk,) * 3,
    *(swap_blocks,) * 2,
    wrong_magic,
    huge_footer,
    empty,
    directory,
    grow,
)
REWRITTEN: tuple[Mutant, ...] = (
    rewritten(_missing, "missing column"),
    rewritten(_renamed, "renamed column"),
    rewritten(_narrow, "int32 for int64"),
    rewritten(_null_label, "null label"),
    rewritten(_null_in_list, "null in a list"),
    rewritten(_nested, "nested list"),
    rewritten(_far_id, "id outside its table"),
    rewritten(_bad_label, "label that is no label"),
    rewritten(_one_group, "fewer rows"),
)
