"""Evaluation on the later split: every row once, metrics over all of them, predictions to Parquet.

Each evaluation makes its own loader, in file order, so that its batches never mix with training's. Ranks may hold
different numbers of rows, also none. A batch is cut to balance.budget and reaches the device as in training: packed,
pinned for CUDA, by one transfer (ready.py). Predictions are gathered and put in the order of sample_id: figures do not
depend on the number of processes.

Legend: B rows of a batch, N rows of the split, T tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gem_data.interface import Batch, Loader, Schema
from torch import Tensor

from gem_pipelines.batches import check_batch
from gem_pipelines.features import to_model_input
from gem_pipelines.metrics import evaluate_task
from gem_pipelines.parallelize import ParallelModel
from gem_pipelines.ready import pack, place
from gem_pipelines.runtime import Runtime

Cut = Callable[[Sequence[Batch]], Sequence[Batch]]


def predict(
    parallel: ParallelModel, loader: Loader, *, schema: Schema, runtime: Runtime, cut: Cut | None = None
) -> dict[str, Tensor]:
    """Predictions of all rows of one pass of `loader`, from all ranks, ordered by sample_id, on the CPU.

    cut  what is computed at once: a batch as batches, equally many on all ranks (`Trainer.cut`); None: as it comes
    Returns sample_id (N,), user_id (N,) int64; label, weight, prediction (N, T) float64. The model is left in the
    mode it was in. A rank that cannot read a batch raises its error, and the others RemoteError, at the same batch.
    """
    was_training = parallel.module.training
    parallel.module.eval()
    ids, numbers = [torch.zeros(0, 2, dtype=torch.int64)], [torch.zeros(0, 3, len(schema.labels), dtype=torch.float64)]
    try:
        with torch.no_grad():
            read = _read_together(loader, schema, runtime, open_ids=parallel.policies)
            for batch in read if cut is None else (part for whole in read for part in cut([whole])):
                rows = batch.sample_ids.shape[0]
                packed = pack(batch, schema, pin=runtime.device.type == "cuda")
                placed, host = place(packed, runtime.device), packed.batch
                vectors = parallel.tables(placed.ids)
                inputs = to_model_input(placed, vectors, schema=schema, policies=parallel.policies, on_host=host)
                logits_BT = parallel.module(inputs)[:rows]
                p_BT = torch.sigmoid(logits_BT.double()).cpu()
                ids.append(torch.stack([batch.sample_ids, batch.user_ids], dim=1))
                numbers.append(torch.stack([batch.labels.double(), batch.weights.double(), p_BT], dim=1))
    finally:
        parallel.module.train(was_training)
    ids_N2, numbers_N3T = runtime.gather_rows(torch.cat(ids)), runtime.gather_rows(torch.cat(numbers))
    order = torch.argsort(ids_N2[:, 0], stable=True)
    ids_N2, numbers_N3T = ids_N2[order], numbers_N3T[order]
    return {
        "sample_id": ids_N2[:, 0],
        "user_id": ids_N2[:, 1],
        "label": numbers_N3T[:, 0],
        "weight": numbers_N3T[:, 1],
        "prediction": numbers_N3T[:, 2],
    }


def _read_together(loader: Loader, schema: Schema, runtime: Runtime, *, open_ids: Collection[str]) -> Iterator[Batch]:
    """Batches of one pass. Before each, ranks tell whether they have it: a lookup waits for all of them."""
    batches = loader.epoch()
    while True:
        batch, failure = None, None
        try:
            batch = next(batches, None)
            if batch is not None:
                check_batch(batch, schema, open_ids=open_ids)
        except Exception as error:
            failure = error
        runtime.agree(failure, what="evaluation")
        if batch is None:
            return
        yield batch


def evaluation_record(
    predictions: dict[str, Tensor], *, tasks: tuple[str, ...], step: int, started: float
) -> dict[str, Any]:
    """The "eval" record. `started` is time.perf_counter() at the start of the evaluation."""
    user_N = predictions["user_id"].numpy()

    def column(name: str, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return predictions[name][:, number].numpy()

    return {
        "kind": "eval",
        "step": step,
        "samples": int(user_N.size),
        "tasks": {
            task: evaluate_task(user_N, column("prediction", t), column("label", t), column("weight", t))
            for t, task in enumerate(tasks)
        },
        "seconds": time.perf_counter() - started,
    }


def write_predictions(path: Path, predictions: dict[str, Tensor], tasks: tuple[str, ...]) -> None:
    """One row a sample: sample_id, user_id, and label.<t>, weight.<t>, prediction.<t> of every task. All or nothing."""
    columns = {
        "sample_id": pa.array(predictions["sample_id"].numpy()),
        "user_id": pa.array(predictions["user_id"].numpy()),
    }
    for t, task in enumerate(tasks):
        for name in ("label", "weight", "prediction"):
            columns[f"{name}.{task}"] = pa.array(predictions[name][:, t].contiguous().numpy())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.table(columns), temporary, write_page_checksum=True)
    os.replace(temporary, path)
