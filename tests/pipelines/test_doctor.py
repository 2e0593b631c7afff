"""The doctor on installations that are whole, broken, mixed and incomplete, made up through its version lookups."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gem_pipelines import doctor
from rich.console import Console

CPU_SET = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "triton": "3.7.1",
    "pyarrow": "26.0.1",
}
CUDA_SET = {"torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0", "triton": "3.6.0", "pyarrow": "26.0.1"}


def fake_torch(*, gloo: bool = True, nccl: bool = False, gpus: int = 0) -> dict[str, Any]:
    properties = SimpleNamespace(name="A GPU", total_memory=80 * 2**30, major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: gpus > 0, device_count=lambda: gpus, get_device_properties=lambda index: properties
    )
    torch = SimpleNamespace(
        cuda=cuda,
        version=SimpleNamespace(cuda=None),
        get_num_threads=lambda: 2,
        ops=SimpleNamespace(fbgemm=SimpleNamespace(asynchronous_complete_cumsum=None)),
    )
    dist = SimpleNamespace(is_available=lambda: True, is_gloo_available=lambda: gloo, is_nccl_available=lambda: nccl)
    return {"torch": torch, "torch.distributed": dist}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(versions, faults={module: error}, **fake_torch) makes the doctor see that installation."""

    def install(versions: dict[str, str], faults: dict[str, Exception] | None = None, **torch: Any) -> None:
        modules = {
            **fake_torch(**torch),
            "fbgemm_gpu": SimpleNamespace(__variant__="cpu"),
            **{name: SimpleNamespace() for name in ("pyarrow", "torchrec", "triton")},
        }

        def load(name: str) -> Any:
            if faults and name in faults:
                raise faults[name]
            return modules[name]

        monkeypatch.setattr(doctor, "version_of", versions.get)
        monkeypatch.setattr(doctor, "load", load)
        monkeypatch.setattr(doctor, "damaged_file", lambda distribution: None)
        monkeypatch.setattr(doctor, "check_attention", lambda: [])

    return install


def outcome() -> tuple[int, str]:
    text = io.StringIO()
    code = doctor.run_doctor(Console(file=text, width=400))
    return code, text.getvalue()


def finding(name: str) -> doctor.Check:
    found = [check for check in doctor.diagnose() if check.name == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


@pytest.mark.parametrize(("versions", "name"), [(CPU_SET, "CPU"), (CUDA_SET, "CUDA")])
def test_known_sets_pass(machine: Any, versions: dict[str, str], name: str) -> None:
    machine(versions)
    assert finding("torch + torchrec + fbgemm").found == f"the {name} set, known to fit"
    code, text = outcome()
    assert code == 0
    assert "Training can run here." in text
    assert "error" not in text


def test_a_set_that_was_not_tried_is_a_warning_that_lists_the_good_ones(machine: Any) -> None:
    machine(CPU_SET | {"torchrec": "1.9.2"})
    check = finding("torch + torchrec + fbgemm")
    assert check.status == "warning"
    assert "torchrec 1.9.2" in check.found
    assert "torchrec 1.8.0, fbgemm-gpu-cpu 1.8.0" in check.advice
    assert "torchrec 1.6.1, fbgemm-gpu 1.6.0" in check.advice
    assert outcome()[0] == 0, "it imports, so training may run"


def test_both_fbgemm_builds_installed(machine: Any) -> None:
    machine(
        CPU_SET | {"fbgemm-gpu": "1.9.0"}, {"fbgemm_gpu": OSError("libcudart.so.13: cannot open shared object file")}
    )
    check = finding("fbgemm")
    assert check.status == "error"
    assert "fbgemm-gpu-cpu 1.8.0, fbgemm-gpu 1.9.0: both builds are installed" in check.found
    assert "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu" in check.advice
    assert "--no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0" in check.advice
    assert "libcudart.so.13" in finding("fbgemm operators").found
    code, text = outcome()
    assert code == 1
    assert "Training cannot run here: fbgemm, fbgemm operators." in text


def test_repair_names_the_set_of_the_torch_that_is_installed(machine: Any) -> None:
    machine(CUDA_SET | {"fbgemm-gpu-cpu": "1.8.0"})
    assert "--no-deps fbgemm-gpu==1.6.0 torchrec==1.6.1" in finding("fbgemm").advice
    machine({"torch": "2.12.1+cu130"})
    assert "fbgemm-gpu==1.6.0" in doctor._repair_advice(), "a CUDA torch of another version gets the CUDA set"


@pytest.mark.parametrize("missing", ["torch", "torchrec", "pyarrow"])
def test_a_missing_library_is_named(machine: Any, missing: str) -> None:
    versions = {name: version for name, version in CPU_SET.items() if name != missing}
    faults = {name: ModuleNotFoundError(f"No module named {missing!r}") for name in (missing, f"{missing}.distributed")}
    machine(versions, faults)
    assert finding(missing).found == "not installed"
    code, text = outcome()
    assert code == 1
    assert missing in text.rsplit("Training cannot run here:", 1)[1]


def test_missing_fbgemm(machine: Any) -> None:
    machine({name: version for name, version in CPU_SET.items() if name != "fbgemm-gpu-cpu"})
    assert finding("fbgemm").found == "not installed"
    assert outcome()[0] == 1


def test_an_import_that_fails_shows_its_message(machine: Any) -> None:
    machine(
        CPU_SET, {"torchrec": AttributeError("'_OpNamespace' 'fbgemm' object has no attribute [bold]jagged[/bold]")}
    )
    assert finding("torchrec").status == "error"
    code, text = outcome()
    assert code == 1
    assert "has no attribute [bold]jagged[/bold]" in text, "the message is shown as it is, not as markup"


def test_operators_that_did_not_register(machine: Any) -> None:
    machine(CPU_SET)
    doctor.load("torch").ops.fbgemm = SimpleNamespace()
    assert finding("fbgemm operators").status == "error"
    assert outcome()[0] == 1


def test_triton_is_not_needed(machine: Any) -> None:
    machine({name: version for name, version in CPU_SET.items() if name != "triton"})
    assert finding("triton").status == "info"
    assert outcome()[0] == 0
    machine(CPU_SET, {"triton": ImportError("libtriton.so: wrong ELF class")})
    assert "wrong ELF class" in finding("triton").found
    assert outcome()[0] == 0


def test_gloo_is_needed_and_nccl_is_not(machine: Any) -> None:
    machine(CPU_SET, gloo=False)
    assert outcome()[0] == 1
    machine(CPU_SET, gloo=True, nccl=False)
    assert finding("nccl").status == "info"
    assert outcome()[0] == 0


def test_devices(machine: Any) -> None:
    machine(CUDA_SET, gpus=2, nccl=True)
    assert finding("cuda:1").found == "A GPU, 80 GiB, compute capability 9.0"
    machine(CPU_SET)
    assert finding("cuda").found == "none: torch is a build without CUDA"


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version_tuple", lambda: ("3", "10", "4"))
    assert doctor.check_python().status == "error"
    monkeypatch.setattr(doctor.platform, "python_version_tuple", lambda: ("3", "11", "0"))
    assert doctor.check_python().status == "ok"


def test_an_overwritten_library_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fbgemm-gpu was installed over the CPU build and removed again: the metadata looks right, the file is not."""
    package, info = tmp_path / "fbgemm_gpu", tmp_path / "fbgemm_gpu_cpu-1.8.0.dist-info"
    package.mkdir()
    info.mkdir()
    library = package / "fbgemm_gpu_py.so"
    library.write_bytes(b"cpu build")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fbgemm_gpu-cpu\nVersion: 1.8.0\n")
    (info / "RECORD").write_text("fbgemm_gpu/fbgemm_gpu_py.so,sha256=x,9\nfbgemm_gpu/__init__.py,sha256=x,1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert doctor.damaged_file("fbgemm-gpu-cpu") is None
    library.write_bytes(b"the CUDA build")
    assert doctor.damaged_file("fbgemm-gpu-cpu") == (
        "its file fbgemm_gpu/fbgemm_gpu_py.so was overwritten (14 bytes, installed 9)"
    )
    library.unlink()
    assert doctor.damaged_file("fbgemm-gpu-cpu") == "its file fbgemm_gpu/fbgemm_gpu_py.so is missing"
    pytest.importorskip("importlib_metadata")  # answers for importlib.metadata from then on
    assert doctor.damaged_file("fbgemm-gpu-cpu") == "its file fbgemm_gpu/fbgemm_gpu_py.so is missing"


def test_a_damaged_build_is_an_error(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(CPU_SET)
    monkeypatch.setattr(doctor, "damaged_file", lambda distribution: "its file x.so is missing")
    check = finding("fbgemm")
    assert (check.status, check.found) == ("error", "fbgemm-gpu-cpu 1.8.0: its file x.so is missing")


def test_attention_implementations_are_tried() -> None:
    """Each is run for real: what this machine can run says so, a GPU kernel without a GPU says why not."""
    checks = {check.name: check for check in doctor.check_attention()}
    assert checks["attention reference"].status == "ok"
    assert checks["attention eager"].status == "ok"
    assert checks["attention eager"].needed
    refused = [check for check in checks.values() if check.status == "info"]
    assert all("cannot run here" in check.found for check in refused)


def test_a_wrong_implementation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from gem_attention import api

    monkeypatch.setattr(api, "attention", lambda q, k, v, **_: torch.full_like(q, torch.nan))
    assert {check.status for check in doctor.check_attention()} == {"error"}

    def broken(q: Any, k: Any, v: Any, **_: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(api, "attention", broken)
    assert all("no kernel image" in check.found for check in doctor.check_attention())


def test_the_doctor_imports_without_torch() -> None:
    """It must start where torch cannot: nothing heavy is imported with it."""
    heavy = "{'torch', 'torchrec', 'fbgemm_gpu', 'triton', 'pyarrow'}"
    code = f"import sys; import gem_pipelines.doctor; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
