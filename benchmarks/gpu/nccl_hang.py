"""Hangs and kills of NCCL jobs on two GPUs of one host: one command, no network, about three minutes.

    OUT=results python benchmarks/gpu/nccl_hang.py
    OUT=results python benchmarks/gpu/nccl_hang.py --device cpu          the same over gloo: a dry run

1. One rank stops (SIGSTOP), or skips a collective on the device, with the watchdog's limit at 5 s: all ranks must end
   within the limit + 5 s with a code other than 0, and RUN/hang/.../report.txt must name the rank, its step, the
   collective on the device by its size, and the stacks of both.
2. The same skip without a watchdog, for comparison: the process group's own limit of 10 s must be told. When the
   processes end is torch's own affair, and only written down: over NCCL both were still there after 45 s.
3. kill -9 of one rank under torchrun: the job ends within 10 s with a code other than 0.
4. A training job of the debug recipe, twice from begin to end, and once killed (SIGKILL of one rank) and started again:
   losses, digests of all checkpoints and ledger equal to the bit. Needs pyarrow, TorchRec and FBGEMM; where pyarrow
   cannot be imported this part is left out, and the result says so.

Parts 1 to 3 run at the same time, then the jobs of part 4 do. Writes $OUT/nccl_hang.json, prints a line a case, ends
with 1 where a case failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device import DeviceRecord, describe_device
from record import write_record

RANK = Path(__file__).with_name("nccl_hang_rank.py")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (*ROOT.glob("packages/*/"), ROOT / "pipelines", ROOT / "datasets", ROOT / "benchmarks")
sys.path[:0] = map(str, PACKAGES)
WITHOUT = dict.fromkeys(("energy", "ceilings", "device_before"), "faults are tried; what is timed is how jobs end")
WORLD, LIMIT_S, SLACK_S = 2, 5.0, 5.0
OPTIONS = ("rows=2000", "users=100", "items=200", "streams=2", "max_length=12")


class Ranks:
    """The processes of one job on this host, each with a log."""

    def __init__(self, work: Path, arguments: list[str]) -> None:
        work.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.logs = [work / f"rank-{rank}.log" for rank in range(WORLD)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            about = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_WORLD_SIZE": str(WORLD),
            }
            about |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with log.open("a") as out:
                command = [sys.executable, str(RANK), *arguments]
                self.processes.append(
                    subprocess.Popen(command, env=environment() | about, stdout=out, stderr=subprocess.STDOUT)
                )

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes when all have ended, or after `seconds`; None for one that runs."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(0.02)
        return [process.poll() for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self) -> str:
        return "\n".join(f"-- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(self.logs))


def environment() -> dict[str, str]:
    paths = os.pathsep.join([*map(str, PACKAGES), os.environ.get("PYTHONPATH", "")])
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    return {**off, **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def since_fault(directory: Path, *, seconds: float) -> float:
    """When the fault happened, on the monotonic clock; waits for it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = directory / "fault"
        if path.exists() and path.read_text():
            return float(path.read_text())
        time.sleep(0.01)
    raise RuntimeError(f"{directory}: the fault did not come within {seconds} s")


def hang(work: Path, device: str, fault: str) -> dict[str, Any]:
    """A rank that stands still, found by the watchdog."""
    ranks = Ranks(work, ["loop", str(work), device, fault, str(LIMIT_S)])
    try:
        since = since_fault(work, seconds=60)
        codes = ranks.wait(LIMIT_S + 20)
        took = time.monotonic() - since
        path = work / "hang" / "start-0" / "report.txt"
        report = path.read_text() if path.exists() else ""
        parts = report.split("\nrank ")
        collective = f"all_reduce [[{loop_size()}]]"
        checks = {
            "all ended": None not in codes,
            "no code 0": 0 not in codes,
            "code 5 told": 5 in codes,
            "in time": took <= LIMIT_S + SLACK_S,
            "both ranks reported": [part[:1] for part in parts[1:]] == ["0", "1"],
            "rank and step named": parts[0].startswith("HANG: rank ") and "in step 5 for" in report,
            "collective on the device named": collective in report,
            "stacks of both": all(part.count("File ") > 3 for part in parts[1:]) and len(parts) == WORLD + 1,
        }
        if fault == "stop":
            checks["the stopped one marked"] = len(parts) > WORLD and "STOPPED" in parts[2]
        shown = [line.strip() for line in report.splitlines() if collective in line and "done" not in line]
        more = {"pending": shown[:4], "head": parts[0][:200]}
        return {**outcome(checks, ranks), "seconds": took, "codes": codes, "limit_s": LIMIT_S, **more}
    finally:
        ranks.end()


def timeout(work: Path, device: str) -> dict[str, Any]:
    """A skipped collective without a watchdog: the process group's limit of 10 s."""
    ranks = Ranks(work, ["loop", str(work), device, "skip", "0"])
    try:
        since = since_fault(work, seconds=60)
        codes = ranks.wait(45)
        took = time.monotonic() - since
        said = ranks.said()
        named = [line.strip() for line in said.splitlines() if "timeout" in line.lower() or "timed out" in line.lower()]
        checks = {"no code 0": 0 not in codes, "message": bool(named)}
        return {**outcome(checks, ranks), "seconds": took, "codes": codes, "limit_s": 10.0, "said": named[:3]}
    finally:
        ranks.end()


def kill(work: Path, device: str) -> dict[str, Any]:
    """kill -9 of a rank under torchrun."""
    work.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command += [str(RANK), "loop", str(work), device, "kill", "60"]
    with (work / "log").open("w") as log:
        job = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        since = since_fault(work, seconds=60)
        try:
            code: int | None = job.wait(60)
        except subprocess.TimeoutExpired:
            code = None
        took = time.monotonic() - since
        said = (work / "log").read_text()
        checks = {
            "ended": code is not None,
            "no code 0": code != 0,
            "in time": took <= 10,
            "SIGKILL named": "-9" in said,
        }
        failed = [name for name, right in checks.items() if not right]
        return {"failed": failed, "seconds": took, "codes": [code], "log": said[-3000:] if failed else ""}
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


def outcome(checks: dict[str, bool], ranks: Ranks) -> dict[str, Any]:
    failed = [name for name, right in checks.items() if not right]
    return {"failed": failed, "log": ranks.said() if failed else ""}


def loop_size() -> int:
    from nccl_hang_rank import SIZE

    return SIZE


# --------------------------------------------------------------------------------------------------- training


def whole_run(work: Path, device: str, data: Path) -> dict[str, Any]:
    """From begin to end."""
    begin = time.monotonic()
    ranks = Ranks(work, ["train", str(work / "run"), device, str(data)])
    try:
        codes = ranks.wait(80)
        checks = {"codes 0": codes == [0] * WORLD}
        return {**outcome(checks, ranks), "codes": codes, "seconds": time.monotonic() - begin}
    finally:
        ranks.end()


def killed_run(work: Path, device: str, data: Path) -> dict[str, Any]:
    """One rank gets SIGKILL when the run is in step 34, and the other ends within the run's limit, as no launcher ends
    it before; started again, the run must end well.
    """
    from gem_pipelines.flight import read_flights
    from nccl_hang_rank import TRAIN_LIMIT_S

    arguments, begin = ["train", str(work / "run"), device, str(data)], time.monotonic()
    ranks = Ranks(work, arguments)
    try:
        step = 0
        while step < 34 and time.monotonic() < begin + 60 and ranks.processes[1].poll() is None:
            step = max((flight.step for flight in read_flights(work / "run" / "supervision")), default=0)
            time.sleep(0.001)
        ranks.processes[1].kill()
        killed = time.monotonic()
        codes = ranks.wait(TRAIN_LIMIT_S + SLACK_S)
        alone = time.monotonic() - killed
    finally:
        ranks.end()
    again = whole_run(work, device, data)
    checks = {
        "killed while it ran": codes[1] == -signal.SIGKILL and step >= 34,
        "the other one ended": codes[0] not in (None, 0),
    }
    failed = [name for name, right in checks.items() if not right]
    more = {"codes_of_the_killed": codes, "other_ended_after_s": alone, "killed_in_step": step}
    return {
        **again,
        **more,
        "failed": again["failed"] + failed,
        "log": again["log"] or (ranks.said() if failed else ""),
    }


def compare(runs: dict[str, Path]) -> dict[str, Any]:
    """Losses and states of the runs, by step, and which of them differ."""
    from gem_pipelines.checkpoint_format import list_steps, step_directory
    from gem_pipelines.checkpoint_manifest import read_manifest, state_digest
    from gem_pipelines.ledger import read_ledger
    from gem_pipelines.rundir import read_records

    found: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        records = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"]
        steps = list_steps(run / "checkpoints")
        found[name] = {
            "losses": {r["step"]: (r["loss"], r["grad_norm"], r["loss_by_task"], r["samples"]) for r in records},
            "states": {s: state_digest(read_manifest(step_directory(run / "checkpoints", s))) for s in steps},
            "samples": {0: read_ledger(run / "ledger")["sample_id"].tolist()},
        }
    result: dict[str, Any] = {"steps": len(found["one"]["losses"]), "checkpoints": sorted(found["one"]["states"])}
    for name in [name for name in found if name != "one"]:
        for what, values in found["one"].items():
            other = found[name][what]
            differ = sorted(step for step in values.keys() | other.keys() if values.get(step) != other.get(step))
            result[f"{what} of {name} that differ"] = differ[:5]
    return result


def training(work: Path, device: str) -> dict[str, dict[str, Any]]:
    try:
        import pyarrow
    except ImportError as error:
        return {"training": {"failed": [], "left_out": f"{error}: needs pyarrow"}}
    from gem_pipelines.data_source import prepare_named

    data = work / "data"
    prepare_named("synthetic", OPTIONS, data, say=lambda line: None)
    with ThreadPoolExecutor() as pool:
        running = {
            "training, whole": pool.submit(whole_run, work / "one", device, data),
            "training, whole again": pool.submit(whole_run, work / "two", device, data),
            "training, killed": pool.submit(killed_run, work / "killed", device, data),
        }
        found = {name: future.result() for name, future in running.items()}
    if not any(case["failed"] for case in found.values()):
        equal = compare({name: work / name / "run" for name in ("one", "two", "killed")})
        failed = [name for name, steps in equal.items() if name.endswith("differ") and steps]
        found["training, equal to the bit"] = {"failed": failed, **equal}
    return {**found, "versions": {"failed": [], "pyarrow": pyarrow.__version__}}


def say(case: str, result: dict[str, Any]) -> None:
    """A line as soon as a case is through; the end of its log where it failed."""
    more = f", {result['seconds']:.1f} s, codes {result['codes']}" if "seconds" in result else ""
    state = "left out" if "left_out" in result else "ok"
    if result["failed"]:
        state = "FAILED: " + ", ".join(result["failed"])
    print(f"{case}: {state}{more}", flush=True)
    if result.get("log"):
        print(result["log"][-1500:], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("all", "faults", "training"), default="all")
    given = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    begin, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            "stopped rank": lambda: hang(work / "stop", given.device, "stop"),
            "skipped collective": lambda: hang(work / "skip", given.device, "skip"),
            "skipped, without watchdog": lambda: timeout(work / "timeout", given.device),
            "killed rank, torchrun": lambda: kill(work / "kill", given.device),
        }
        if given.only != "training":
            with ThreadPoolExecutor() as pool:
                running = {case: pool.submit(run) for case, run in cases.items()}
                for case, future in running.items():
                    error = future.exception()
                    found[case] = future.result() if error is None else {"failed": [f"{type(error).__name__}: {error}"]}
                    say(case, found[case])
        if given.only != "faults":
            found |= (trained := training(work, given.device))
            for case, result in trained.items():
                say(case, result)
    record = {"device": given.device, "seconds": time.monotonic() - begin, "cases": found}
    device = describe_device(0) if given.device == "cuda" else DeviceRecord(name="none")
    write_record(out / "nccl_hang.json", record, ceilings={}, before=device, after=device, without=WITHOUT)
    return int(any(result["failed"] for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
