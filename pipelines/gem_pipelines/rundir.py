"""The run directory: everything a run leaves behind, and all that resuming and reporting read.

    config.json              the resolved config
    cost.json                coefficients of the load of a row (cost_run.py), those of the run's start
    command.txt              the command that repeats the run; after a resume also the one that went on, and so forth
    versions.json            packages, interfaces, machine; "earlier": those before a resume, where they differ
    metrics.jsonl            one record a line (start, train, eval, end; a resumed run has a start for every process)
    tensorboard/             the same figures as TensorBoard events
    predictions-<step>.parquet
    checkpoints/step-<NNNNNNNN>/
    supervision/             what each rank is doing (flight.py); starts that did not reach the end (restarts.py)
    hang/start-<N>/          stacks and last collectives of all ranks, where a start stood still (watchdog.py)
    run.lock                 held by the job that writes here
    report.html, report.md   written by `gemline report`

A run that has started is never overwritten: training into its directory needs --resume.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gem_pipelines.config import RunConfig
from gem_pipelines.config_codec import from_json, to_json
from gem_pipelines.contract import installed_versions
from gem_pipelines.errors import RunError
from gem_pipelines.runlock import RunLock
from gem_pipelines.safe_files import read_json, refuse_links, sync_directory

_PREDICTIONS = re.compile(r"predictions-(\d+)\.parquet")
_HALF_WRITTEN = re.compile(
    r"\.(predictions-\d+\.parquet|command\.txt|versions\.json|config\.json|cost\.json|metrics\.jsonl)\.\d+"
)
_DISTRIBUTIONS = ("gemline", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow", "safetensors")


class RunDirectory:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []

    @property
    def config_file(self) -> Path:
        """The resolved config."""
        return self.path / "config.json"

    @property
    def cost_file(self) -> Path:
        """What a row costs in this run."""
        return self.path / "cost.json"

    @property
    def metrics_file(self) -> Path:
        """The records."""
        return self.path / "metrics.jsonl"

    @property
    def lock_file(self) -> Path:
        """Locked by the one job that writes here (runlock.py)."""
        return self.path / "run.lock"

    @property
    def supervision(self) -> Path:
        """What the ranks are doing, and how earlier starts ended."""
        return self.path / "supervision"

    @property
    def checkpoints(self) -> Path:
        """Parent of the checkpoint directories."""
        return self.path / "checkpoints"

    def predictions_file(self, step: int) -> Path:
        """Predictions of the evaluation at `step`."""
        return self.path / f"predictions-{step}.parquet"

    def acquire_lock(self) -> RunLock:
        """Make the directory where it is missing, and lock it. Raises LockError."""
        refuse_links(self.path)
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        return RunLock.acquire(self.lock_file)

    def give_up_lock(self, lock: RunLock) -> None:
        """Give the lock back; and where no run came of it, take away the directories that were made for it."""
        unused = bool(self._made) and [path.name for path in self.path.iterdir()] == [self.lock_file.name]
        lock.release(remove=unused)
        with contextlib.suppress(OSError):  # not empty: someone else is here
            for path in self._made if unused else ():
                path.rmdir()

    def check_unused(self) -> None:
        """Raise RunError where a run exists here already. One that was killed while this directory was made does not:
        config.json is written last, and nothing was trained.
        """
        begun = self.checkpoints.exists() and any(self.checkpoints.iterdir())
        if self.config_file.exists() or begun:
            raise RunError(
                f"{self.path} holds a run already and is not overwritten: add --resume to go on with it, "
                "or choose another --run-dir"
            )

    def create(self, config: RunConfig, *, command: str, costs: dict[str, Any] | None = None) -> None:
        """Make the directory and write what describes the run."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._write_costs(costs)
        write_text(self.path / "command.txt", command + "\n")
        write_text(self.path / "versions.json", json.dumps(collect_versions(), indent=2) + "\n")
        self.write_config(config)
        for made in self._made:  # the directories themselves, or a loss of power takes all that is in them
            sync_directory(made.parent)

    def go_on(self, config: RunConfig, *, command: str, step: int, costs: dict[str, Any] | None = None) -> None:
        """Note that the run goes on from `step`: its command and versions, its config, and only records up to there."""
        versions = self._versions_from(step)
        commands = self.path / "command.txt"
        before = commands.read_text() if commands.exists() else ""
        write_text(commands, f"{before}# resumed from step {step}:\n{command}\n")
        write_text(self.path / "versions.json", json.dumps(versions, indent=2) + "\n")
        self._write_costs(costs)
        self.write_config(config)
        self.forget_after(step)

    def _versions_from(self, step: int) -> dict[str, Any]:
        """versions.json with those of now on top, and as "earlier" others that trained steps before: up to `step`."""
        path, now = self.path / "versions.json", collect_versions()
        try:
            before = read_json(path) if path.exists() else {}
        except RunError as error:
            raise RunError(f"{error}; repair it or remove it") from None
        earlier = before.pop("earlier", [])
        if before and before != now:
            earlier = [*earlier, {"up_to_step": step, **before}]
        return now | ({"earlier": earlier} if earlier else {})

    def _write_costs(self, costs: dict[str, Any] | None) -> None:
        if costs is not None:
            write_text(self.cost_file, json.dumps(costs, indent=2) + "\n")

    def write_config(self, config: RunConfig) -> None:
        """Write config.json."""
        write_text(self.config_file, json.dumps(to_json(config), indent=2) + "\n")

    def read_config(self) -> RunConfig:
        """The config of an existing run."""
        if not self.config_file.is_file():
            raise RunError(f"{self.path} holds no run to resume: {self.config_file} does not exist")
        refuse_links(self.path)
        config = from_json(RunConfig, read_json(self.config_file))
        assert isinstance(config, RunConfig)
        return config

    def has_evaluation(self, step: int) -> bool:
        """Whether metrics.jsonl holds an evaluation of `step`."""
        if not self.metrics_file.exists():
            return False
        return any(r.get("kind") == "eval" and r.get("step") == step for r in read_records(self.metrics_file))

    def forget_after(self, step: int) -> None:
        """Drop what was written of steps after `step`, ahead of a checkpoint that never became durable: records,
        predictions, a last line that a kill cut, and files that it left half written. They are written again.
        """
        for path in self.path.iterdir():
            predicted = _PREDICTIONS.fullmatch(path.name)
            if (predicted and int(predicted.group(1)) > step) or _HALF_WRITTEN.fullmatch(path.name):
                path.unlink()
        if not self.metrics_file.exists():
            return
        kept = [r for r in read_records(self.metrics_file) if r.get("step", 0) <= step and r.get("kind") != "end"]
        write_text(self.metrics_file, "".join(json_line(record) for record in kept))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl. A last line without line end (a killed writer) is left out; any other bad line is
    an error.
    """
    text = path.read_text()
    lines = text.split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise RunError(f"{path}, line {number}: not JSON") from None
    return records


def json_line(record: dict[str, Any]) -> str:
    """One line of JSON. A number that is not finite becomes null, which every JSON reader understands."""
    return json.dumps(finite(record), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """`value` with None in place of every number that is not finite, and lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_text(path: Path, text: str) -> None:
    """Write `path` all or nothing, and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


@cache
def _processor() -> str:
    """The processor's name, as Linux tells it; elsewhere what Python knows."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@cache
def _distributions() -> dict[str, str]:
    """Name -> version of what is installed, as the process first found it, since what it has loaded stays.

    Asked once, too, because every checkpoint asks while training stands still, and looking through the folders of
    sys.path and parsing what lies there is most of what Python does for a snapshot of a small model.
    """
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def collect_versions() -> dict[str, Any]:
    """Versions of what computed a run, and on what."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **_distributions(),
        "interfaces": {name: list(version) for name, version in installed_versions().items()},
    }
