"""The other side of isolated.py: decodes Parquet in a process of its own and hands Arrow back through shared memory.

    python -m gem_data.reader_process MEMORY_FD LIMIT_BYTES

Reads one JSON request a line from standard input, {"path", "group": null | int, "columns": [...]}; answers one JSON
line: {"bytes": n} with the Arrow stream of the row group (or, for a footer, of its schema) in the shared memory, for a
footer also {"group_rows": [...], "seconds": [[first, last] or null, ...], "size": bytes of the file}; or {"error":
text, "kind": name, "errno": number or null}. Ends when its input ends, so it never outlives the trainer. Imports
pyarrow and nothing of torch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem_data.blocks import timestamp_bounds


def serve(memory: int, limit_bytes: int) -> None:
    """Answer until the input ends."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line), memory)
        except (pa.ArrowException, OSError, EOFError, ValueError, MemoryError) as error:
            answer = failure(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def failure(error: BaseException) -> dict[str, Any]:
    """The answer for a request that ended so. Of pyarrow's OSErrors, those of damage have no number."""
    text = " ".join(str(error).split()) or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    return {"error": text[:2000], "kind": type(error).__name__, "errno": number}


def _answer(request: dict[str, Any], memory: int) -> dict[str, Any]:
    size = os.stat(request["path"]).st_size
    with pq.ParquetFile(
        request["path"], page_checksum_verification=True, arrow_extensions_enabled=False, memory_map=False
    ) as file:
        if request["group"] is None:
            metadata = file.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            written = _write(memory, pa.Table.from_batches([], file.schema_arrow))
            seconds = [timestamp_bounds(metadata, group) for group in range(metadata.num_row_groups)]
            told = {"bytes": written, "group_rows": rows, "seconds": seconds}
            return {**told, "rows": metadata.num_rows, "size": size}
        table = file.read_row_group(request["group"], columns=request["columns"], use_threads=False)
    return {"bytes": _write(memory, table), "size": size}


def _write(memory: int, table: pa.Table) -> int:
    os.ftruncate(memory, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    with os.fdopen(memory, "wb", closefd=False) as file:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        file.flush()
        return file.tell()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
