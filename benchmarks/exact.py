"""Whether the counters are exact: takes them in fresh processes that differ in what must not matter, lists what varies.

    python benchmarks/exact.py                          # every case but the compiled kernels, five processes
    python benchmarks/exact.py --cases '^pipelines' --runs 3
    python benchmarks/exact.py --alone                  # and each case in a process of its own

The processes differ in the folder they run in, the length of sys.path, the depth of the folder for temporary files, and
in how strings hash: a counter that depends on one of these is the machine's and not the code's, and in another checkout
the gate would fail for nothing. Exit code 1 if one varies. Cost: a process takes as long as the counters part of the
gate without its kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CI = Path(__file__).parents[1] / "ci"
TAKE = """
import json, sys
from gate_counters import KERNELS, take_here
taken, wrong = take_here(sys.argv[1], KERNELS, inverted=True)
assert not wrong, wrong
json.dump(taken, open(sys.argv[2], "w"))
"""

Counters = dict[str, dict[str, int]]


def take_fresh(pattern: str, number: int, folder: Path) -> Counters:
    """Counters of the matching cases, in fresh process `number`: the higher, the farther from the ordinary."""
    place = folder.joinpath(*["t" * 7] * number)
    place.mkdir(exist_ok=True, parents=True)
    more = [place / f"path{index}" for index in range(number)]
    for path in more[::2]:  # of the others there is nothing on disk
        path.mkdir(exist_ok=True)
    path = [str(CI), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *map(str, more)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONHASHSEED": str(number),
        "TMPDIR": str(place),
    }
    output = place / "counters.json"
    command = [sys.executable, "-W", "ignore", "-c", TAKE, pattern, str(output)]
    subprocess.run(command, env=environment, cwd=place if number else None, check=True)
    return json.loads(output.read_text())


def varying(taken: list[Counters]) -> dict[str, list[Any]]:
    """ "case/counter" -> its figure in each process, of those that are not the same everywhere."""
    keys = {(case, name): None for counters in taken for case, figures in counters.items() for name in figures}
    found = {key: [counters.get(key[0], {}).get(key[1]) for counters in taken] for key in keys}
    return {"/".join(key): figures for key, figures in found.items() if len(set(figures)) > 1}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a counter varies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=".*", help="a regular expression")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="once more, each case in a process of its own")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        taken = [take_fresh(given.cases, number, Path(folder)) for number in range(given.runs)]
        if given.alone:
            single: Counters = {}
            for case in taken[0]:
                single |= take_fresh(f"^{re.escape(case)}$", given.runs, Path(folder))
            taken.append(single)
    different = varying(taken)
    for key, figures in different.items():
        print(f"{key}: {', '.join(map(str, figures))}")
    counters = sum(map(len, taken[0].values()))
    print(f"{counters} counters of {len(taken[0])} cases, {len(taken)} times: {len(different)} vary")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
