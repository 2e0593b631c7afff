"""Compile the kernels for a GPU that is not here, and read what the compiler says: registers, spills, instructions.

The launch code runs as it is, on small CPU tensors; only the driver is replaced, by one that names a target and
launches nothing. So what is compiled is exactly what a GPU host would compile. The figures have no noise: they gate in
CI. Cost: 2 to 20 s a kernel. Must run in a process without TRITON_INTERPRET.

Example:
    with CrossCompiler(90) as compiler:
        triton_launch.forward(problem)
    print(compiler.reports[0].registers, compiler.reports[0].spill_instructions)
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


@dataclass(frozen=True, kw_only=True)
class Report:
    """One compiled kernel. shared_bytes: dynamic shared memory of a program; the counts are of machine instructions.

    spill_instructions: loads and stores of local memory (LDL, STL) anywhere; hot_spills: those in innermost loops that
    hold matrix instructions, so paid in every step (the others are paid once a tile). wgmma: HGMMA or UTCHMMA, the
    matrix instructions of Hopper and Blackwell; mma: HMMA, the older, slower ones. tma: bulk tensor copies (UTMALDG,
    UTMASTG, UTMAREDG).
    """

    name: str
    capability: int
    warps: int
    shared_bytes: int
    registers: int
    spill_instructions: int
    hot_spills: int
    wgmma: int
    mma: int
    tma: int
    instructions: int


class _Driver:
    """Names a target and the current device; there is nothing behind it."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


class CrossCompiler:
    """Within the context every kernel launch compiles for `capability` (90, 100) and is recorded, not run."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: list[Any] = []
        self.functions: list[Any] = []

    def __enter__(self) -> CrossCompiler:
        self._run = triton.runtime.JITFunction.run
        self._active = driver._active
        compiler, run = self, self._run

        def record(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            del warmup
            if function not in compiler.functions:  # what was compiled for another target must not be found
                compiler.functions.append(function)
                function.device_caches.clear()
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            compiler.kernels.append(kernel)
            return kernel

        triton.runtime.JITFunction.run = record  # type: ignore[method-assign]
        driver.set_active(_Driver(self.capability))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        triton.runtime.JITFunction.run = self._run  # type: ignore[method-assign]
        driver._active = self._active
        for function in self.functions:
            function.device_caches.clear()

    @property
    def reports(self) -> list[Report]:
        """One report for each launch, in order."""
        return [report_of(kernel, self.capability) for kernel in self.kernels]


def report_of(kernel: Any, capability: int) -> Report:
    """Read a compiled kernel's machine code with the disassembler that comes with Triton."""
    cubin = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("cuobjdump", "--dump-sass", file.name)
    code = _instructions(sass)
    opcodes = [op for _, op, _ in code]

    def count(*names: str) -> int:
        return sum(op.split(".")[0] in names for op in opcodes)

    registers = max(int(r) for r in re.findall(r"REG:(\d+)", usage))
    return Report(
        name=kernel.metadata.name,
        capability=capability,
        warps=kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spill_instructions=count("LDL", "STL"),
        hot_spills=_hot_spills(code),
        wgmma=count("HGMMA", "UTCHMMA"),
        mma=count("HMMA"),
        tma=count("UTMALDG", "UTMASTG", "UTMAREDG"),
        instructions=len(opcodes),
    )


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], check=True, capture_output=True, text=True).stdout


_LINE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)", re.MULTILINE)
_MATRIX = ("HGMMA", "UTCHMMA", "HMMA")


def _instructions(sass: str) -> list[tuple[int, str, int | None]]:
    """(address, opcode, branch target or None) of each instruction."""
    code = []
    for address, op, rest in _LINE.findall(sass):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if op.startswith("BRA") else None
        code.append((int(address, 16), op, int(target.group(1), 16) if target else None))
    return code


def _hot_spills(code: list[tuple[int, str, int | None]]) -> int:
    """Local-memory instructions in innermost loops (of backward branches) that hold matrix instructions."""
    loops = {(target, at) for at, _, target in code if target is not None and target <= at}
    inside = {loop: [(at, op.split(".")[0]) for at, op, _ in code if loop[0] <= at <= loop[1]] for loop in loops}
    matrix = [loop for loop in loops if any(op in _MATRIX for _, op in inside[loop])]
    inner = [a for a in matrix if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in matrix)]
    return len({at for loop in inner for at, op in inside[loop] if op in ("LDL", "STL")})
