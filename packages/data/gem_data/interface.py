"""What gem_data promises: the native layout, the batch, and the loader. Nothing else is public.

1.0  first version
1.1  FileInfo.xxh3: what a file contains, so that other data of equal size are told apart
1.2  CostModel, CostTerm: the load of a row; LoaderConfig.base_batch, base_pool, cost: base-batch shuffling
1.3  LoaderConfig.open_ids: features whose ids may lie outside their tables
1.4  FileInfo.blocks_xxh3: hashes of the footer and of the columns of row groups, compared before anything is decoded
1.5  LoaderConfig.features, labels: read only these columns; LoaderConfig.stochastic_length
1.6  Schema.impression, Batch.requests: a row is a request with several impressions; CostModel.per_impression,
     CostTerm.targets: what impressions add to the load of a row
1.7  LoaderConfig.readers: threads that decode row groups ahead
1.8  conversions to requests and back keep row groups; write_dataset(table_groups)

The native layout is a directory:

    schema.json                 what the columns mean (`Schema`)
    train-00000.parquet ...     one row = one impression, or one request; page checksums on
    eval-00000.parquet ...

Columns, by name (all non-null, lists without null elements):

    sample_id              int64            unique within the data set
    user_id                int64            groups rows by user (GAUC, history checks); not a model feature
    timestamp              int64            seconds; a row's histories hold only events strictly earlier
    label.<task>           float32          0 or 1
    weight.<task>          float32          >= 0; optional, 1 where the column is absent
    id.<name>              int64            scalar id in [0, rows of its table)
    ids.<name>             list<int64>      bag of ids
    dense.<name>           float32          finite
    stream.<s>.<field>     list<int64>      ids of the events of stream s, oldest first
    stream.<s>.action      list<int64>      bit mask of what the user did: bit k set = action k
    stream.<s>.time        list<int64>      seconds, non-decreasing, all < timestamp

All `stream.<s>.*` lists of a row have equal length. Id 0 of a table is by convention "unknown".

Requests: where `Schema.impression` names features, a row is a request: user_id, timestamp, streams and all features
that are not named stand in it once, for all its impressions. sample_id, label.*, weight.* and the named features are
lists with one entry an impression, of equal length within a row and never empty: list<int64>, list<float32>, and for a
named `ids.<name>` list<list<int64>>.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

INTERFACE_VERSION = (1, 8)


class DataError(ValueError):
    """Bad data: names file, row group, row and column, what was expected, what came and what to do.

    The place is in the message and, for programs, in the attributes (None = does not apply):
    file       path relative to schema.json (or the name of an in-memory source)
    row_group  0-based row group of the file
    row        0-based row within that row group
    column     column name
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        row_group: int | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.row_group = row_group
        self.row = row
        self.column = column


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """An id space that one embedding table serves: valid ids are 0 <= id < rows."""

    name: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class IdFeature:
    """An id column: `name` is the feature, `table` the id space it draws from (shared tables: same `table`)."""

    name: str
    table: str


@dataclass(frozen=True, kw_only=True)
class LabelInfo:
    """A binary task. `weighted` says whether the column weight.<name> exists."""

    name: str
    weighted: bool = False


@dataclass(frozen=True, kw_only=True)
class StreamInfo:
    """An event stream: parallel lists `fields` (ids; the first is the item), action bit mask and time."""

    name: str
    fields: tuple[IdFeature, ...]
    action_bits: int
    max_length: int


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """One Parquet file: path relative to schema.json, its split ("train" or "eval"), its rows.

    xxh3  xxh3-64 of the file's bytes, 16 hexadecimal digits; "" where the data set was written before 1.1
    blocks_xxh3  the same of the footer, then of each column of each row group, compared before they are decoded; empty
          where the data set was written before 1.4 or by another program: a process of its own decodes such files
    """

    path: str
    split: str
    rows: int
    xxh3: str = ""
    blocks_xxh3: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schema:
    """schema.json. `facts` is free JSON that travels with the data (best possible NE, floors, source).

    impression  of data whose rows are requests: the features that each impression has of its own, by column ("id.item",
                "ids.tags", "dense.bid"). Empty: a row is one impression, and nothing below differs between levels
    """

    name: str
    created_by: str
    tables: tuple[TableInfo, ...]
    labels: tuple[LabelInfo, ...]
    scalars: tuple[IdFeature, ...] = ()
    lists: tuple[IdFeature, ...] = ()
    dense: tuple[str, ...] = ()
    streams: tuple[StreamInfo, ...] = ()
    files: tuple[FileInfo, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    impression: tuple[str, ...] = ()

    def table_rows(self) -> dict[str, int]:
        """Rows of every table by name."""
        return {table.name: table.rows for table in self.tables}

    def id_features(self) -> tuple[tuple[str, str], ...]:
        """(feature key, table) of every id column, in KeyedJaggedTensor key order.

        Scalars, then lists, then stream fields as "<stream>.<field>": the order of `Batch.ids.keys()`.
        """
        own = [(feature.name, feature.table) for feature in (*self.scalars, *self.lists)]
        events = [(f"{stream.name}.{f.name}", f.table) for stream in self.streams for f in stream.fields]
        return (*own, *events)

    def request_keys(self) -> tuple[str, ...]:
        """Keys of `id_features` that stand once in a request; none where a row is one impression."""
        if not self.impression:
            return ()
        own = {column.partition(".")[2] for column in self.impression if not column.startswith("dense.")}
        return tuple(key for key, _ in self.id_features() if key not in own)


@dataclass(frozen=True, kw_only=True)
class EventStream:
    """One stream of a batch, packed: row b owns events offsets[b]:offsets[b+1], oldest first.

    offsets  (B + 1,) int64, starts at 0, non-decreasing
    actions  (N,) int64 bit masks, N = offsets[-1]
    times    (N,) int64 seconds

    Two rows with events at times (10, 20) and (15,): offsets [0, 2, 3], times [10, 20, 15].
    The ids of the events are in `Batch.ids` under "<stream>.<field>", in the same order.
    """

    offsets: Tensor
    actions: Tensor
    times: Tensor

    def to(self, device: Any, *, non_blocking: bool = False) -> EventStream:
        """A copy on `device`."""
        return EventStream(
            offsets=self.offsets.to(device, non_blocking=non_blocking),
            actions=self.actions.to(device, non_blocking=non_blocking),
            times=self.times.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's part of one global batch. B impressions (B may be 0), T tasks, F dense features, R rows of the data.

    R = B, and a row is an impression, but where rows are requests: then `requests` says whose impressions are whose.

    sample_ids   (B,) int64
    user_ids     (B,) int64
    timestamps   (B,) int64 seconds
    labels       (B, T) float32 in {0, 1}, tasks in schema order
    weights      (B, T) float32 >= 0
    dense        (B, F) float32, features in schema order
    ids          KeyedJaggedTensor, keys = Schema.id_features(), stride B; scalars have length 1 in every row. Values
                 and lengths are int64; it has no weights
    streams      stream name -> EventStream of R rows
    row_index    (B, 3) int64: file (index into Schema.files), row group, row within the group
    global_rows  rows of the whole global batch over all ranks
    step         0-based number of this batch since the start of the run (monotone over epochs)
    requests     None, or (R + 1,) int64: request r has the impressions requests[r]:requests[r + 1], one at least

    Ids that stand once in a request (Schema.request_keys) are in `ids` once, in the row of its first impression; in the
    rows of the others they have length 0. So one KeyedJaggedTensor of one stride looks every id up once.

    Two requests of 2 and 1 impressions, keys [user, item], users (5, 6), items (1, 2, 3): requests [0, 2, 3],
    values [5, 6, 1, 2, 3], lengths [1, 0, 1, 1, 1, 1], stride 3.
    """

    sample_ids: Tensor
    user_ids: Tensor
    timestamps: Tensor
    labels: Tensor
    weights: Tensor
    dense: Tensor
    ids: KeyedJaggedTensor
    streams: dict[str, EventStream]
    row_index: Tensor
    global_rows: int
    step: int
    requests: Tensor | None = None

    @property
    def rows(self) -> int:
        """R: rows of the data, which batching, balancing and sharding move whole."""
        return self.sample_ids.shape[0] if self.requests is None else self.requests.shape[0] - 1

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """A copy on `device`."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return Batch(
            sample_ids=move(self.sample_ids),
            user_ids=move(self.user_ids),
            timestamps=move(self.timestamps),
            labels=move(self.labels),
            weights=move(self.weights),
            dense=move(self.dense),
            ids=self.ids.to(device, non_blocking=non_blocking),
            streams={name: stream.to(device, non_blocking=non_blocking) for name, stream in self.streams.items()},
            row_index=move(self.row_index),
            global_rows=self.global_rows,
            step=self.step,
            requests=None if self.requests is None else move(self.requests),
        )


@dataclass(frozen=True, kw_only=True)
class CostTerm:
    """One term of a row's load: `coefficient` times the tokens, or the attended pairs, of one stream of the row.

    A row with L events of `stream` has T = L + extra tokens (extra: context and candidate tokens that a model adds).

    pairs   False: the term counts T. True: it counts (query, key) pairs that the mask lets meet:
    causal  True: T (T + 1) / 2, or with window w > 0 the sum of min(t, w) over t = 1..T; False: T^2, or with window
            w > 0 the pairs at most w apart
    window  0 = no window
    targets candidate tokens that each further impression of a request adds to the one in `extra`: they meet the T - 1
            tokens before them and themselves (within the window), never one another. Else without effect
    repeated  the whole term counts once for each impression, as where a stream is computed by each of them

    Three events, no extra: tokens 3, causal pairs 6, full pairs 9, causal window 2: 1 + 2 + 2 = 5.
    Three events, extra 1, targets 1, a request of 3 impressions: tokens 4 + 2, causal pairs 10 + 2 * 4.
    """

    stream: str
    coefficient: float = 1.0
    pairs: bool = False
    causal: bool = True
    window: int = 0
    extra: int = 0
    targets: int = 0
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Load of rows: a + b L + c sum L^2, by stream, window and mask. cost.py evaluates and fits it.

    unit        what it predicts: "seconds", "flops", "bytes" or "events"
    per_step    once a batch, whatever its rows (left out of the load of a row)
    per_sample  once a row
    per_impression  once for each further impression of a request
    """

    unit: str
    per_step: float = 0.0
    per_sample: float = 0.0
    terms: tuple[CostTerm, ...] = ()
    per_impression: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How rows become batches.

    global_batch_size  rows of one optimizer micro-step over all ranks; of request data that many requests, whole
    shuffle            deterministic from `seed` and the epoch; off = file order (of every logical shard; of the
                       whole split with logical_shards = 1)
    window_groups      row groups shuffled together (a larger window mixes better and holds more memory)
    logical_shards     independent row-group sequences that a global batch is dealt from. The global order depends
                       on this number and never on the world size; with world size dividing it and it dividing
                       global_batch_size, each rank reads only its own row groups (but for an epoch's tail).
    max_length         keep only the latest events of each stream (parallel lists cut alike), never more than the
                       schema's limit; None = schema's limit
    drop_last          drop the last, smaller global batch of an epoch
    prefetch           batches made ahead by a thread (0 = everything in line, by no thread)
    readers            threads that decode the row groups of the next window while batches of the present one are made
                       (0 = the thread of prefetch decodes a window when its first row is due). More than 1 with
                       prefetch 0 is refused. Changes nothing that comes out
    base_batch         base-batch shuffling: rows of a base batch, the unit that is moved so that every shard's share
                       of every batch weighs about the same; global_batch_size / logical_shards must be a multiple of
                       at least twice it, and logical_shards one of the world size. None = off
    base_pool          base batches that are sorted together, at most those of a window
    cost               load of a row for base_batch; None = its events
    open_ids           features (keys of Batch.ids) whose ids may lie outside their table: whoever looks them up decides
                       what becomes of them. Changes no order: a state loads whatever it was
    features           columns to read, by name without the part that is a file's own: "id.item", "ids.tags",
                       "dense.age", "stream.views" (all of it), "stream.views.item" (this field, with actions and
                       times; the stream's first field must be among those named). Nothing else is read, and `schema`
                       of the loader has nothing else. Empty = all
    labels             tasks to read; empty = all
    stochastic_length  alpha in [1, 2]: a stream that has L events after max_length has cut it to at most N is cut to
                       its latest M = N^(alpha/2) where L > M, but for a share N^alpha / L^2 of such rows, which stay
                       whole. Drawn anew every epoch from the seed and the row's place; 2 cuts nothing. None = off
    """

    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    window_groups: int = 8
    logical_shards: int = 1
    max_length: int | None = None
    drop_last: bool = False
    prefetch: int = 2
    readers: int = 1
    base_batch: int | None = None
    base_pool: int = 256
    cost: CostModel | None = None
    open_ids: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    stochastic_length: float | None = None


class Loader(Protocol):
    """Yields this rank's `Batch` of each global batch; every rank yields the same number of batches.

    schema             of the data set, as far as it is read (LoaderConfig.features and labels)
    rows_per_epoch     rows of the split that one epoch yields over all ranks (fewer than the split's with drop_last)
    batches_per_epoch  global batches of one epoch
    """

    schema: Schema
    rows_per_epoch: int
    batches_per_epoch: int

    def epoch(self) -> Iterator[Batch]:
        """Batches from the current position to the end of the current epoch; then the epoch number rises by one.

        The current position is after the last batch yielded (not: prefetched, not: trained). Starting a new epoch(),
        `load_state_dict` and `close` end an earlier iterator: asking it for more raises ValueError.
        """
        ...

    def mark_trained(self, batch: Batch) -> None:
        """Say that `batch`, and with it every batch before it, was trained: only then does `state_dict()` move past it.

        Raises ValueError for a batch that was not yielded since the start or the last load_state_dict, or twice.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position after the last trained batch.

        Independent of rank, world size and reading ahead. Names, per logical shard, the file, row group and row where
        the next sample is read, beside epoch, step and trained samples.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError if the files, seed or batch settings differ from those of `state`.

        World size, rank, prefetch and readers may differ. Nothing changes when it raises.
        """
        ...

    def close(self) -> None:
        """Stop reading ahead and let go of files and memory. Idempotent; epoch() may be called again."""
        ...
