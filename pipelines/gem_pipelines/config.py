"""`RunConfig`: everything that decides what a run computes, as frozen keyword-only dataclasses.

A run is a Python function in `recipes/` that returns a complete `RunConfig`; the command line changes single values
by dotted name (`--optimizer.lr 1e-3`); the resolved config is saved in the run directory and in every checkpoint.
There is no other place that configures: no environment variables, no registries, no files that include files. Types
are checked when a config is made, and a bool is never taken for an int.

Changing a value of `FREE_ON_RESUME` when a run is resumed does not change what a step computes (up to rounding for
another device or mesh; another number of steps is refused unless the schedule is constant); changing any other is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gem_pipelines.config_codec import check_types
from gem_pipelines.errors import ConfigError, did_you_mean
from gem_pipelines.model.config import ModelConfig

FREE_ON_RESUME = frozenset(
    {
        "train.steps",
        "train.epochs",
        "train.eval_every",
        "train.eval_batch_size",
        "train.predictions",
        "train.survey_rows",
        "train.ledger",
        "train.spike_factor",
        "train.replica_check_every",
        "train.checkpoint_every",
        "train.keep_checkpoints",
        "train.checkpoint_async",
        "train.checkpoint_full_every",
        "train.on_save_error",
        "train.max_skipped_steps",
        "train.record_every",
        "train.print_every",
        "train.profile_every",
        "train.peak_flops_per_s",
        "train.tensorboard",
        "train.report",
        "train.timeout_s",
        "train.hang_limit_s",
        "train.restart_limit",
        "train.device",
        "parallel.expert",
        "parallel.shard",
        "parallel.replicate",
        "parallel.table_shard",
        "parallel.table_replica",
        "parallel.table_sharding",
        "parallel.fully_sharded",
        "parallel.overlap",
        "parallel.reshard",
        "tables.sharding",
        "tables.planner",
        "tables.cache_share",
        "model.compile",
        "model.graphs",
        "data.source",
        "data.options",
        "data.cache",
        "data.prefetch",
        "data.readers",
        "data.max_quarantined_rows",
        "balance.cost",  # a name: the coefficients themselves are compared (cost_run.py)
        "name",
    }
)


POLICIES = ("error", "drop", "hash", "zch")
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid")
EVICTIONS = ("lfu", "lru", "distance_lfu")


def _pairs(key: str, texts: tuple[str, ...], expected: str) -> dict[str, str]:
    """{"a": "b"} of "a=b"."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in found:
            raise ConfigError(f"{key}: {text!r}; expected {expected}")
        found[name] = value
    return found


def _at_least(section: str, minimum: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value >= minimum:  # also refuses NaN
            raise ConfigError(f"{section}.{name} is {value}, expected at least {minimum}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how rows become batches."""

    source: str = "synthetic"
    """A directory with schema.json, a URL of one (through fsspec), or the name of a data set."""
    options: tuple[str, ...] = ()
    """Options of a named data set, as name=value."""
    cache: str = "data"
    """Where named data sets are kept after they were prepared once."""
    global_batch_size: int = 512
    """Rows of one micro-batch over all processes."""
    accumulate: int = 1
    """Micro-batches per optimizer step. Their gradients add up, of the dense model and of the tables."""
    shuffle: bool = True
    """Deterministic from train.seed and the epoch."""
    window_groups: int = 8
    """Row groups shuffled together."""
    logical_shards: int = 1
    """Row group sequences that a batch is dealt from; the order depends on it, and never on the number of processes."""
    max_length: int | None = None
    """Keep only the latest events of each stream; None: the schema's limit."""
    features: tuple[str, ...] = ()
    """Columns that are read and trained on, as "id.item", "ids.tags", "dense.age", "stream.views" (all of it) or
    "stream.views.item" (this field); empty: all."""
    labels: tuple[str, ...] = ()
    """Tasks that are read and trained on; empty: all."""
    stochastic_length: float | None = None
    """alpha in [1, 2]: training keeps only the latest N^(alpha/2) events of rows that have more, N the longest, but for
    a share N^alpha / L^2 of rows of L events, which stay whole; drawn every epoch. None: off. Not in evaluation."""
    max_quarantined_rows: int = 0
    """How many rows of a run may be lost to row groups that are damaged or hold bad values; such a group is left out
    whole, counted and written down. 0: the first stops the run. Above 0 the survey before the run is left out."""
    stream_seconds: int | None = None
    """Train in the order of time: windows of at least so many seconds one after the other, each evaluated on the next,
    strictly later one before that is trained. Row groups must be in the order of time. None: shuffled epochs."""
    drop_last: bool = False
    """Drop the smaller last batch of an epoch."""
    prefetch: int = 2
    """Batches made ahead by a thread; 0: everything in line."""
    readers: int = 1
    """Threads that decode the next window's row groups while the present one is trained, per process; the order is the
    same with any number. They hold one window more of every shard. 0: none, a window is decoded when it is due."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        _at_least("data", 1, global_batch_size=self.global_batch_size, accumulate=self.accumulate)
        _at_least("data", 1, window_groups=self.window_groups, logical_shards=self.logical_shards)
        _at_least("data", 1, max_length=self.max_length, stream_seconds=self.stream_seconds)
        _at_least("data", 0, prefetch=self.prefetch, readers=self.readers)
        _at_least("data", 0, max_quarantined_rows=self.max_quarantined_rows)
        if self.readers > 1 and not self.prefetch:
            raise ConfigError(
                f"data.readers is {self.readers}, expected 0 or 1 with data.prefetch 0, which reads nothing ahead"
            )
        if self.stochastic_length is not None and not 1 <= self.stochastic_length <= 2:
            raise ConfigError(f"data.stochastic_length is {self.stochastic_length}, expected 1 to 2, or None")


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """The optimizer of the embedding tables: exact row-wise AdaGrad, fused into backward. Dims belong to the model."""

    impl: Literal["torchrec", "reference"] = "torchrec"
    """Implementation of the tables; "reference" is the slow definition, for one process."""
    lr: float = 0.05
    """Base learning rate; follows the schedule of the optimizer section where scheduled."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    scheduled: bool = True
    """Apply warm-up and schedule to the tables too."""
    sharding: tuple[str, ...] = ()
    """How tables lie on the processes of a copy, as table=kind: "table_wise" (whole on one), "row_wise", "column_wise"
    (2 parts; "column_wise:4": 4), "data_parallel" (whole on each), "table_row_wise" and "grid" (over a host's; pooled
    tables only). What is not named is table_wise, or what the planner says; the start record names what was done.
    Tables cut by columns ("column_wise", "grid") keep a moment a part: another model, on any number of processes."""
    planner: str | None = None
    """A topology (TOML file, or the name of a shipped one): TorchRec's planner places the tables for it. None: whole
    tables, largest first to the least loaded process."""
    cache_share: float | None = None
    """CUDA: keep the tables in host memory and so large a share of their rows in a cache on the device. None: tables on
    the device. Needs parallel.table_replica 1."""
    policies: tuple[str, ...] = ()
    """What happens to ids outside their table, as feature=policy; "error" (stop the run) where a feature is not named.
    "drop": no vector, or zeros; "hash": another row, never row 0; "zch": ids are any integers and earn their rows, for
    all features of a table at once. Counted by feature in metrics and report."""
    zch: tuple[str, ...] = ()
    """Tables of features with policy "zch", as table=eviction:interval or table=eviction:interval:rows. Eviction:
    "lfu", "lru" or "distance_lfu"; interval: steps between two rounds of it; rows: of the table, the schema's where
    left out. A table that is not named: lfu:100."""

    def __post_init__(self) -> None:
        check_types(self, "tables")
        _at_least("tables", 0, lr=self.lr, eps=self.eps)
        for table, kind in self.sharding_of().items():
            name, colon, parts = kind.partition(":")
            if name not in SHARDINGS:
                raise ConfigError(f"tables.sharding: {table}={kind}; {did_you_mean(name, SHARDINGS)}")
            if colon and (name not in ("column_wise", "grid") or not parts.isdecimal() or int(parts) < 1):
                raise ConfigError(f"tables.sharding: {table}={kind}; expected a number of parts of column_wise or grid")
        self.zch_of()
        for feature, policy in self.policy_of().items():
            if policy not in POLICIES:
                raise ConfigError(f"tables.policies: {feature}={policy}; {did_you_mean(policy, POLICIES)}")

    def policy_of(self) -> dict[str, str]:
        """Feature -> policy."""
        return _pairs("tables.policies", self.policies, "feature=policy, each feature once")

    def sharding_of(self) -> dict[str, str]:
        """Table -> kind."""
        return _pairs("tables.sharding", self.sharding, "table=kind, each table once")

    def zch_of(self) -> dict[str, tuple[str, int, int | None]]:
        """Table -> (eviction policy, interval, rows or None)."""
        found: dict[str, tuple[str, int, int | None]] = {}
        for table, text in _pairs("tables.zch", self.zch, "table=eviction:interval, each table once").items():
            policy, *numbers = text.split(":")
            if policy not in EVICTIONS:
                raise ConfigError(f"tables.zch: {table}={text}; {did_you_mean(policy, EVICTIONS)}")
            if len(numbers) not in (1, 2) or not all(n.isdecimal() and int(n) >= 1 for n in numbers):
                raise ConfigError(f"tables.zch: {table}={text}; expected eviction:interval or eviction:interval:rows")
            found[table] = (policy, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)
        return found

    def open_ids(self) -> tuple[str, ...]:
        """Features whose ids may lie outside their table."""
        return tuple(feature for feature, policy in self.policy_of().items() if policy != "error")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The dense optimizer: AdamW."""

    lr: float = 1e-3
    """Base learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; biases and norms are not decayed."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Shape after the warm-up."""
    floor: float = 0.0
    """Share of the base learning rate at the end of the cosine."""
    max_grad_norm: float | None = 1.0
    """Clip dense gradients to this global norm; None: do not clip."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer")
        _at_least("optimizer", 0, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _at_least("optimizer", 0, warmup_steps=self.warmup_steps, floor=self.floor)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"optimizer.max_grad_norm is {self.max_grad_norm}, expected above 0, or None")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas}, expected two numbers in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How model and tables lie on the processes. expert x shard x replicate and table_shard x table_replica are both
    the number of processes; with table_sync "gradients" no choice changes what is computed, up to rounding."""

    expert: int = 1
    """Processes that share their samples, each owning an equal part of the experts (interactions "dhen", "experts")."""
    shard: int = 1
    """Processes over which dense parameters, gradients and optimizer state are cut."""
    replicate: int | None = None
    """Copies of the dense model; None: what is left of the number of processes."""
    table_shard: int | None = None
    """Processes that hold one copy of all tables together; None: what is left."""
    table_replica: int = 1
    """Copies of the tables."""
    fully_sharded: bool = False
    """Between steps each process keeps 1 / table_replica of its part of the tables."""
    table_sharding: Literal["table_wise", "row_wise"] = "table_wise"
    """How a copy of the tables lies on its processes: each table whole on one, or cut over all (but for tables with too
    few rows). Computes the same; tables.sharding says it table by table."""
    table_sync: Literal["gradients", "average"] = "gradients"
    """"gradients": copies apply the same sum of gradients, the model of one process. "average": each copy applies its
    own, then weights and moments are averaged; fewer bytes, another model."""
    table_sync_every: int = 1
    """"average": micro-batches between two averages."""
    moment_scaling: bool = True
    """"average": divide the second moment by table_replica, which keeps the size of steps."""
    reshard: bool = True
    """Free the gathered parameters of a layer, and of an expert, after its forward pass and gather them once more for
    its backward pass. False: keep them in between, which takes their memory and saves the second gather."""
    overlap: bool = True
    """Check the next step's batches and send their ids to the tables' owners while this step is computed."""

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        _at_least("parallel", 1, expert=self.expert, shard=self.shard, replicate=self.replicate)
        _at_least("parallel", 1, table_shard=self.table_shard, table_replica=self.table_replica)
        _at_least("parallel", 1, table_sync_every=self.table_sync_every)
        if self.table_sync_every > 1 and (self.table_sync == "gradients" or self.fully_sharded):
            raise ConfigError(
                f"parallel.table_sync_every is {self.table_sync_every}: gradients, and fully sharded copies, are "
                "exchanged at every step; use 1, or table_sync 'average' with fully_sharded False"
            )


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How rows are spread so that every process's step takes alike long. Loss and gradients are weighted by true
    counts whatever it says."""

    method: Literal["none", "base", "global"] = "none"
    """"base": base batches are moved inside each logical shard, nothing is sent; another order of rows. "global": the
    rows of a global batch are exchanged between processes, one step ahead; the same global batches (not with copies of
    tables that are averaged, parallel.table_sync)."""
    base_batch: int = 128
    """"base": rows that are moved together."""
    base_pool: int = 256
    """"base": base batches that are sorted together, at most those of a window (data.window_groups)."""
    partition: Literal["lpt", "kk"] = "lpt"
    """"global": heaviest row to the least loaded process, or largest differencing."""
    counts: Literal["equal", "free"] = "equal"
    """"global": as many rows on each process as without balance, or any number (not with model.graphs)."""
    cost: str = "flops"
    """Load of a row: "flops" (counted from the model), "events", or a file that `gemline profile --fit-cost` wrote, as
    the first process finds it. The run keeps its coefficients (cost.json) and is resumed with them."""
    budget: float | None = None
    """Largest load of what one process computes at once, in the unit of `cost`: what exceeds it is cut into smaller
    micro-batches, as many on all processes; in evaluation too. It bounds memory: which rows make a step stays
    data.global_batch_size, and the step the same up to rounding. None: not cut."""
    budget_of: Literal["cost", "memory"] = "cost"
    """What `budget` limits: the load that `cost` gives, or the bytes kept for backward, by the model of memory that the
    file named by `cost` has beside the one of time."""

    def __post_init__(self) -> None:
        check_types(self, "balance")
        _at_least("balance", 1, base_batch=self.base_batch)
        _at_least("balance", 2, base_pool=self.base_pool)
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(f"balance.budget is {self.budget}, expected above 0, or None")
        if self.budget_of == "memory" and self.budget is None:
            raise ConfigError("balance.budget_of is 'memory', expected with it balance.budget in bytes, came None")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The job: how long, what is written and measured on the way, and on what it runs."""

    steps: int | None = None
    """Optimizer steps in total; None: as many as `epochs` hold."""
    epochs: int = 1
    """Passes over the training split, where steps is None."""
    seed: int = 0
    """Seeds initialisation, shuffling and dropout."""
    task_weights: tuple[float, ...] = ()
    """Weight of each task's loss, in schema order; empty: 1 each."""
    metric_window: int = 50
    """Steps of the window metrics."""
    eval_every: int = 0
    """Evaluate every so many steps; 0: only at the end."""
    eval_batch_size: int = 2048
    """Rows of one evaluation batch over all processes."""
    spike_factor: float = 8.0
    """Flag a step whose loss or gradient norm is so many spreads above the median of the last steps, with the samples
    of its batch. It is trained all the same. 0: never."""
    replica_check_every: int = 100
    """Compare the copies of parameters, moments and tables every so many steps, and before checkpoints. 0: never."""
    ledger: bool = False
    """Write down which samples were trained at which step, durable with every checkpoint; 'gemline data ledger RUN'
    compares it with the data."""
    survey_rows: int = 1_000_000
    """Data of at most so many rows are read once before the run, every value checked, lengths and rates noted for the
    report; and counting floors are computed at the end. 0: never."""
    predictions: bool = True
    """Write predictions-<step>.parquet at each evaluation."""
    checkpoint_every: int = 0
    """Write a checkpoint every so many steps; 0: only at the end."""
    keep_checkpoints: int = 3
    """How many of the newest sound checkpoints are kept."""
    checkpoint_async: bool = True
    """Write checkpoints beside training, from a snapshot; False: training waits until each is durable."""
    checkpoint_full_every: int = 1
    """Every so many checkpoints a full one; those between hold the table rows that changed since (1: all full)."""
    init_from: str | None = None
    """A checkpoint directory of another run whose weights this run starts from."""
    init_partial: bool = False
    """Take from init_from what fits, and name the rest; False: everything must fit."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """After a checkpoint that could not be written: stop, or go on, counted and told. The last one must succeed."""
    max_skipped_steps: int = 0
    """How many steps of a run may be left out because their batch is bad, or a loss or gradient is not finite; one more
    stops the run. Nothing of such a step is trained. 0: the first stops it."""
    record_every: int = 1
    """Steps per record in metrics.jsonl and TensorBoard."""
    print_every: int = 1
    """Steps per line where the output is not a terminal."""
    profile_every: int = 50
    """Steps between two steps whose time is split by part; 0: never."""
    peak_flops_per_s: float | None = None
    """Peak of one device, for MFU; None: a large matmul is timed at the start."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    report: bool = True
    """Write the report at the end; 'gemline report RUN' writes it any time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where present."""
    threads: int | None = None
    """Threads of CPU operations; None: as torch chooses. Another number may change the last bits."""
    deterministic: bool = True
    """Refuse operations whose result depends on timing."""
    timeout_s: float = 600.0
    """How long a collective waits before the run fails; also the limit of phases that are no step (start, save)."""
    hang_limit_s: float | None = None
    """A step that takes longer ends all ranks, with stacks; None: 10 times the 99th percentile of measured steps, at
    least 30 s; 0: never."""
    restart_limit: int = 3
    """Automatic restarts in a row from the same checkpoint before the run is stopped with exit code 4."""

    def __post_init__(self) -> None:
        check_types(self, "train")
        _at_least("train", 1, steps=self.steps, epochs=self.epochs, metric_window=self.metric_window)
        _at_least("train", 1, eval_batch_size=self.eval_batch_size, keep_checkpoints=self.keep_checkpoints)
        _at_least("train", 1, checkpoint_full_every=self.checkpoint_full_every)
        _at_least("train", 1, restart_limit=self.restart_limit)
        _at_least("train", 0, hang_limit_s=self.hang_limit_s)
        _at_least("train", 1, record_every=self.record_every, print_every=self.print_every, threads=self.threads)
        _at_least("train", 0, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        _at_least("train", 0, max_skipped_steps=self.max_skipped_steps, spike_factor=self.spike_factor)
        _at_least("train", 0, replica_check_every=self.replica_check_every)
        _at_least("train", 0, profile_every=self.profile_every, seed=self.seed, survey_rows=self.survey_rows)
        for weight in self.task_weights:
            _at_least("train", 0, task_weights=weight)
        if self.peak_flops_per_s is not None and not self.peak_flops_per_s > 0:
            raise ConfigError(f"train.peak_flops_per_s is {self.peak_flops_per_s}, expected above 0, or None")
        if not self.timeout_s > 0:
            raise ConfigError(f"train.timeout_s is {self.timeout_s}, expected above 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A complete run."""

    name: str = "run"
    """Name of the recipe, or of whatever made this config; part of the default run directory."""
    data: DataConfig = field(default_factory=DataConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    def __post_init__(self) -> None:
        check_types(self, "")
        if self.data.stream_seconds is not None and self.train.epochs != 1:
            raise ConfigError(
                f"train.epochs is {self.train.epochs}; with data.stream_seconds data are read once: use 1"
            )
        every = self.parallel.table_sync_every
        if every > 1 and (self.data.accumulate > 1 or self.train.checkpoint_every % every):
            raise ConfigError(
                f"parallel.table_sync_every is {every}, train.checkpoint_every {self.train.checkpoint_every} and "
                f"data.accumulate {self.data.accumulate}: a checkpoint averages the tables, so checkpoint_every must "
                "be a multiple of table_sync_every, and accumulate 1; otherwise saving would change the run"
            )
