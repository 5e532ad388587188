"""Native kernels of the cpu target: rendered once, compiled by g++ into one shared library.

The library names torch's own libraries as needed and carries no search path, because it is only ever loaded into a
process in which torch already is. It is compiled with OpenMP but not linked with it: its symbols resolve through
libtorch_cpu to the runtime that torch runs on, so that two OpenMP runtimes, with two thread pools, cannot meet in one
process. That rules out clang, whose OpenMP code needs its own runtime. Which tile sizes win was measured
(tests/bench/bench_cpu_kernels.py); they differ by instruction set because AVX-512 has twice the registers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepinfer_compile.artifacts import cached
from deepinfer_compile.errors import NativeBuildFailed, NoCompiler, TargetUnavailable
from deepinfer_compile.render import Value, names_of, render
from deepinfer_compile.runtime.batch import PAGE_SIZE

log = logging.getLogger("deepinfer_compile.targets.cpu")
LIBRARY = "libdeepinfer_cpu.so"
RECORD = "kernels.json"
NAMESPACE = "deepinfer_cpu"
"""Namespace of the operations and of all C++ symbols in the templates; a build may put another in its place."""
ISAS = ("x86-64-v3", "x86-64-v4")

_OLDEST_GCC = 11  # the first to know -march=x86-64-v3 and -v4
_FLAGS = (
    *("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-Wno-ignored-attributes"),
)
_LINK = ("-Wl,--no-as-needed", "-l:libstdc++.so.6")
_CPU_FLAGS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"},
}
_HEADERS = (
    "cpu_common/simd.h",
    "cpu_common/dot.h",
    "cpu_common/outer.h",
    "cpu_common/gemm.h",
    "cpu_common/tensors.h",
    "cpu_linear/library.h",
    "cpu_attention/batch.h",
    "cpu_attention/page.h",
    "cpu_attention/plan.h",
    "cpu_attention/attend.h",
    "cpu_experts/activation.h",
    "cpu_experts/routing.h",
    "cpu_experts/weights.h",
)
_UNITS = (
    "cpu_linear/linear.cpp",
    "cpu_attention/attention.cpp",
    "cpu_latent/latent.cpp",
    "cpu_experts/experts.cpp",
    "cpu_streams/streams.cpp",
)


@dataclass(frozen=True)
class Config:
    """Everything the kernel templates may name. Rows are rows of activations, columns are outputs.

    stream_blocks and dot_blocks: (rows, columns, unroll) register tiles for weights along K, for 1..dot_rows rows; the
    first for fp32 weights that come from memory. outer_rows x outer_columns vectors: the tile for weights along N, and
    outer_wide vectors for one row. rows_f32 and rows_bf16: the most rows for which streaming the weight beats the
    library's matrix product. query_rows: query rows of one attention task; up to scan_rows the cost is reading the
    cache; least_pages: the fewest pages worth a task.
    """

    isa: str
    lanes: int
    dot_rows: int
    stream_blocks: tuple[tuple[int, int, int], ...]
    dot_blocks: tuple[tuple[int, int, int], ...]
    outer_rows: int
    outer_columns: int
    outer_wide: int
    rows_f32: int
    rows_bf16: int
    deep_columns: int = 64
    ahead_columns: int = 6
    chunk_columns: int = 6
    x_bytes: int = 32768
    chunk_bytes: int = 65536
    prefetch_bytes: int = 9216
    depth_block: int = 64
    near_depth: int = 16
    thread_bytes: int = 65536
    page: int = PAGE_SIZE
    query_rows: int = 96
    scan_rows: int = 12
    tasks_per_thread: int = 4
    least_pages: int = 2
    tokens_per_thread: int = 16
    dot_chunk: int = 64
    outer_chunk: int = 256


CONFIGS = {
    "x86-64-v4": Config(
        isa="x86-64-v4",
        lanes=16,
        dot_rows=8,
        stream_blocks=((1, 1, 4), (2, 1, 4), (3, 1, 4), (4, 1, 2), (5, 1, 2), (6, 1, 2), (7, 1, 2), (8, 1, 2)),
        dot_blocks=((1, 1, 4), (2, 1, 4), (3, 1, 4), (4, 1, 2), (5, 2, 1), (6, 3, 1), (7, 3, 1), (8, 3, 1)),
        outer_rows=6,
        outer_columns=4,
        outer_wide=16,
        rows_f32=48,
        rows_bf16=16,
    ),
    "x86-64-v3": Config(
        isa="x86-64-v3",
        lanes=8,
        dot_rows=8,
        stream_blocks=((1, 1, 4), (2, 1, 4), (3, 1, 2), (4, 1, 2), (5, 1, 2), (6, 1, 2), (7, 1, 1), (8, 1, 1)),
        dot_blocks=((1, 1, 4), (2, 1, 4), (3, 3, 1), (4, 3, 1), (5, 2, 1), (6, 2, 1), (7, 1, 1), (8, 1, 1)),
        outer_rows=6,
        outer_columns=2,
        outer_wide=8,
        rows_f32=64,
        rows_bf16=24,
    ),
}


def host_isa() -> str:
    """The widest instruction set of `ISAS` that this machine runs. Raises TargetUnavailable."""
    text = Path("/proc/cpuinfo").read_text()
    lines = re.findall(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    flags = set(lines[0].split()) if lines else set()
    for isa in reversed(ISAS):
        if flags >= _CPU_FLAGS[isa]:
            return isa
    missing = " ".join(sorted(_CPU_FLAGS["x86-64-v3"] - flags))
    raise TargetUnavailable(target="cpu", reason=f"this processor lacks {missing}", fix="use an x86-64-v3 machine")


def _refusal(compiler: str) -> str:
    """Why this compiler cannot build the kernels, or an empty string."""
    command = [compiler, "-dM", "-E", "-x", "c++", os.devnull]
    defines = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if "__clang__" in defines:
        return "is clang, whose OpenMP is not torch's"
    version = re.search(r"__GNUC__ (\d+)", defines)
    if version is None:
        return "does not run"
    if int(version[1]) < _OLDEST_GCC:
        return f"is GCC {version[1]}, older than {_OLDEST_GCC}"
    # Code with a C++ runtime of its own ends the process at the first exception that meets torch's.
    command = [compiler, "-print-file-name=libstdc++.so"]
    shared = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return "" if os.path.isfile(shared) else "has no shared C++ runtime (libstdc++.so)"


def find_compiler() -> str:
    """Path of the C++ compiler: the first usable of $CXX, g++ and c++; logged where that is not $CXX.

    Raises NoCompiler.
    """
    tried: list[str] = []
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        path = shutil.which(name)
        refusal = _refusal(path) if path else "is not installed"
        if path and not refusal:
            if tried and os.environ.get("CXX"):
                log.warning("%s, so %s compiles", "; ".join(tried), path)
            return path
        tried.append(f"{name} {refusal}")
    raise NoCompiler(tried="; ".join(tried), target="cpu")


def render_kernels(isa: str) -> dict[str, str]:
    """File name -> C++ text of every header and source of the library for one instruction set of `ISAS`."""
    if isa not in CONFIGS:
        fix = f"use one of {', '.join(ISAS)}"
        raise TargetUnavailable(target="cpu", reason=f"no kernels are written for {isa}", fix=fix)
    values: dict[str, Value] = asdict(CONFIGS[isa])
    texts = {}
    for name in (*_HEADERS, *_UNITS):
        template = f"{name}.j2"
        texts[Path(name).name] = render(template, **{key: values[key] for key in names_of(template)})
    return texts


def build_record(isa: str, namespace: str = NAMESPACE) -> dict[str, object]:
    """What a process must match to load the library, and the namespace it registers there."""
    abi = bool(torch.compiled_with_cxx11_abi())
    return {"isa": isa, "torch": str(torch.__version__), "cxx11_abi": abi, "namespace": namespace}


def source_namespace(isa: str) -> str:
    """A namespace that names the rendered sources, so that libraries of different sources can share a process."""
    text = json.dumps([render_kernels(isa), build_record(isa), _FLAGS, _LINK], sort_keys=True)
    return f"{NAMESPACE}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _run(command: list[str], log_file: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    log_file.write_text(" ".join(command) + "\n" + done.stderr)
    first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
    raise NativeBuildFailed(what_="the CPU kernels", target="cpu", reason=first.strip(), log=log_file)


def _compile(sources: dict[str, str], record: dict[str, object], compiler: str, out_dir: Path, log_dir: Path) -> None:
    """Write sources, library and record into `out_dir`; a failing command's output goes to `log_dir`."""
    isa, namespace = record["isa"], record["namespace"]
    for name, text in sources.items():
        (out_dir / name).write_text(text)
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = [*_FLAGS, f"-march={isa}", abi, f"-D{NAMESPACE}={namespace}"]
    flags += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    units = [Path(name) for name in sources if name.endswith(".cpp")]

    def compile_unit(unit: Path) -> str:
        target = str(out_dir / unit.with_suffix(".o"))
        _run([compiler, *flags, "-c", str(out_dir / unit), "-o", target], log_dir / unit.with_suffix(".log"))
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, units))
    # The C++ runtime that torch runs on, by its shared name and first: a compiler that only has the static one, or a
    # torch that carries a copy of its own, would give us a second, and an exception between the two ends the process.
    link = [compiler, "-shared", "-o", str(out_dir / LIBRARY), *objects, *_LINK]
    link += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run(link, log_dir / "link.log")
    for item in objects:
        Path(item).unlink()
    (out_dir / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def cached_kernels(isa: str, namespace: str = NAMESPACE, log_dir: Path | None = None) -> Path:
    """The folder of the compiled library in the build cache: rendered sources, library and `kernels.json`.

    What was compiled before from the same sources, with the same compiler and torch, is taken from there. Raises
    NoCompiler, NativeBuildFailed (its log goes to `log_dir`, or to a new temporary folder) and
    TargetUnavailable.
    """
    compiler = find_compiler()
    sources, record = render_kernels(isa), build_record(isa, namespace)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    key: dict[str, object] = {"what": LIBRARY, **record, "compiler": version, "flags": [*_FLAGS, *_LINK]}
    key["sources"] = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sources.items()}

    def build(folder: Path) -> None:
        logs = log_dir or Path(tempfile.mkdtemp(prefix="deepinfer-log-"))
        _compile(sources, record, compiler, folder, logs)

    return cached(key, build)


def build_kernels(out_dir: Path, isa: str, namespace: str = NAMESPACE) -> Path:
    """Put the library of one instruction set into `out_dir`; returns its path. Raises what `cached_kernels` raises."""
    out_dir.mkdir(parents=True, exist_ok=True)
    shutil.copytree(cached_kernels(isa, namespace, out_dir), out_dir, dirs_exist_ok=True)
    return out_dir / LIBRARY
