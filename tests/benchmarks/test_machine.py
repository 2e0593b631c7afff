"""A fresh machine: no question is asked, and the machine file is whole (asv issue 944)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import install
import pytest
import torch
from gate_asv import Workplace, git, machine_values, merge, write_machine
from gate_times import clone_with_empty_commit

ROOT = Path(__file__).parents[2]


def test_machine_file_in_an_empty_home(home):
    name = write_machine()
    stored = json.loads((home / ".asv-machine.json").read_text())[name]
    assert stored["machine"] == name
    assert {"os", "arch", "cpu", "num_cpu", "ram", "gpu"} <= stored.keys()
    assert all(stored[key] for key in ("os", "arch", "num_cpu", "gpu"))


def test_the_name_is_of_the_processor_not_of_the_host():
    values = machine_values()
    assert os.uname().nodename not in values["machine"]
    assert values["machine"].startswith("cpu-")
    assert values["num_cpu"] in values["machine"]


def test_asv_asks_nothing(home, monkeypatch):
    """asv's own loader, with interaction allowed and nobody to answer."""
    from asv.machine import Machine

    def ask(*_, **__):
        raise AssertionError("asv asked a question")

    monkeypatch.setattr(Machine, "generate_machine_file", staticmethod(ask))
    loaded = Machine.load(machine_name=write_machine(), interactive=True)
    assert loaded.gpu == "none"


def test_asv_alone_would_leave_the_machine_empty(home):
    """Why the file is written by us: named alone, the machine gets no processor, memory or system."""
    command = [sys.executable, "-m", "asv", "machine", "--yes", "--machine", "box"]
    subprocess.run(command, cwd=Workplace().config(home).parent, check=True, capture_output=True)
    assert json.loads((home / ".asv-machine.json").read_text())["box"] == {"machine": "box"}


def test_configuration_has_absolute_paths_and_this_python(tmp_path):
    tree = json.loads(Workplace(repo=tmp_path, results=tmp_path / "r").config(tmp_path / "c").read_text())
    assert all(os.path.isabs(tree[key]) for key in ("repo", "benchmark_dir", "env_dir", "results_dir", "html_dir"))
    assert (tmp_path / "r").is_dir()


def test_merge_keeps_what_is_recorded(tmp_path):
    def results(folder, commit, benchmark):
        (tmp_path / folder / "m").mkdir(parents=True)
        (tmp_path / folder / "m" / "machine.json").write_text("{}")
        (tmp_path / folder / "m" / f"{commit}-env.json").write_text(commit)
        (tmp_path / folder / "benchmarks.json").write_text(json.dumps({benchmark: {}, "version": 2}))
        return tmp_path / folder

    target = results("old", "aaaaaaaa", "one")
    merge(results("new", "bbbbbbbb", "two"), target)
    assert sorted(path.name for path in (target / "m").iterdir()) == [
        "aaaaaaaa-env.json",
        "bbbbbbbb-env.json",
        "machine.json",
    ]
    assert json.loads((target / "benchmarks.json").read_text()) == {"one": {}, "two": {}, "version": 2}


def test_clone_changes_nothing_but_the_commit(tmp_path):
    clone = clone_with_empty_commit(tmp_path / "clone")
    assert git("rev-parse", "HEAD^{tree}", repo=clone) == git("rev-parse", "HEAD~1^{tree}", repo=clone)
    assert git("rev-parse", "HEAD~1", repo=clone) == git("rev-parse", "HEAD", repo=ROOT)


def test_requirements_of_a_wheel(tmp_path):
    wheel = tmp_path / "gemline-0-py3-none-any.whl"
    lines = [
        "Requires-Dist: numpy>=2.0",
        "Requires-Dist: tqdm; extra == 'torchrec'",
        "Requires-Dist: furo; extra == 'docs'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gemline-0.dist-info/METADATA", "\n".join(["Name: gemline", *lines]))
    assert install.requirements_of(wheel).splitlines() == lines[:2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about hosts without a GPU")
def test_gpu_script_says_that_there_is_no_gpu(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run([str(ROOT / "ci" / "gpu.sh")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sees no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_gpu_script_measures_nothing_whose_facts_would_be_missing(tmp_path):
    """A host with torch and a GPU, and without nvidia-ml-py, whose numbers would be refused at home."""
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    (site / "torch.py").write_text(
        "from types import SimpleNamespace as Some\n"
        "__version__ = '9'\n"
        "properties = lambda index: Some(uuid='u')\n"
        "cuda = Some(is_available=lambda: True, device_count=lambda: 1, get_device_properties=properties)\n"
    )
    (site / "pynvml.py").write_text("raise ImportError('not here')\n")
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "SITE": str(site)}
    done = subprocess.run(
        [str(ROOT / "ci" / "gpu.sh"), "bench"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pynvml absent" in done.stderr
    assert "== bench" not in done.stdout
    assert list(out.iterdir()) == []
