"""The cpu target: our C++ kernels for what is bound by memory, AOTInductor for the rest of every block.

One AOTInductor compile per distinct block, weights and caches as inputs, so a bundle's native code does not grow with
depth and holds no weights. Threads are taken from the running machine, not from the building one. The instruction set
and the torch version are recorded; the loader refuses others.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from deepinfer_compile import ops
from deepinfer_compile.artifacts import cached
from deepinfer_compile.errors import NativeBuildFailed, NoCompiler, TargetUnavailable
from deepinfer_compile.graph import value
from deepinfer_compile.graphjson import to_json
from deepinfer_compile.ops.cpu import register_fakes
from deepinfer_compile.passbase import Pass
from deepinfer_compile.passes.merge_linears import MergeLinears
from deepinfer_compile.passes.select_kernels import SelectKernels
from deepinfer_compile.runtime.native import load_kernels, processor_flags
from deepinfer_compile.targets.base import Job, Limits, Variant
from deepinfer_compile.targets.cpu_kernels import (
    ISAS,
    LIBRARY,
    cached_kernels,
    find_compiler,
    host_isa,
    source_namespace,
)

KERNELS = (
    ("aten.linear", "linear"),
    ("deepinfer.cached_attention", "cached_attention"),
    ("deepinfer.write_kv", "write_kv"),
    ("deepinfer.shared_attention", "shared_attention"),
    ("deepinfer.cached_latent_attention", "cached_latent_attention"),
    ("deepinfer.experts", "experts"),
    ("deepinfer.mix_streams", "mix_streams"),
    ("deepinfer.join_streams", "join_streams"),
)
"""Ops with a kernel, and the kernel's name in the library's namespace."""
SIMD_BITS = {"x86-64-v3": 256, "x86-64-v4": 512}
MAX_SIZE = 1 << 40
LIMITS = Limits(dtypes=("float32", "bfloat16"), device="cpu")


@dataclass(frozen=True)
class CpuTarget:
    """x86-64 Linux."""

    name: str = "cpu"
    limits: Limits = LIMITS

    def missing(self) -> str | None:
        try:
            find_compiler()
        except NoCompiler as err:
            return str(err)
        return None

    def prepare(self, isa: str | None) -> tuple[Pass, ...]:
        """Load the kernels (of this machine, if it cannot run `isa`) for tracing; the passes that bind ops to them."""
        namespace = self.load(isa)
        return (
            SelectKernels(kernels=tuple((op, f"{namespace}.{kernel}") for op, kernel in KERNELS)),
            MergeLinears(one=f"{namespace}.linear", many=f"{namespace}.linears"),
        )

    def load(self, isa: str | None = None) -> str:
        """Load the kernels where this machine runs them, and their fake functions; returns their namespace.

        Raises NoCompiler, NativeBuildFailed, TargetUnavailable.
        """
        wanted = isa or host_isa()
        namespace = source_namespace(wanted)
        if ISAS.index(wanted) <= ISAS.index(host_isa()):
            load_kernels(cached_kernels(wanted, namespace) / LIBRARY)
        register_fakes(namespace)
        return namespace

    def build(self, job: Job, progress: Callable[[str], None]) -> Variant:
        isa = job.isa or host_isa()
        requires = _requires(isa)
        progress("kernels")
        begin = time.perf_counter()
        library = cached_kernels(isa, source_namespace(isa)) / LIBRARY
        seconds = {"kernels": time.perf_counter() - begin}
        folder = sha256(library.read_bytes()).hexdigest()[:16]
        files = {f"kernels/cpu/{folder}/{f.name}": f for f in sorted(library.parent.iterdir()) if f.is_file()}
        paths: dict[str, str] = {}
        for digest, gm in job.blocks.items():
            progress(f"block {digest[:8]}")
            begin = time.perf_counter()
            package = _compile(gm, isa)
            seconds[digest] = time.perf_counter() - begin
            paths[digest] = f"kernels/cpu/{digest[:16]}/block.pt2"
            files[paths[digest]] = package
            files[f"kernels/cpu/{digest[:16]}/block.json"] = package.with_name("block.json")
        libraries = (f"kernels/cpu/{folder}/{LIBRARY}",)
        return Variant(self.name, True, requires, paths, libraries=libraries, files=files, seconds=seconds)


def _requires(isa: str) -> dict[str, Any]:
    """What a machine must offer to run the code. Raises TargetUnavailable if this torch cannot compile for `isa`."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    requires: dict[str, Any] = {"isa": isa, "torch": torch_version, "abi": torch.compiled_with_cxx11_abi()}
    if march_can_be_set():
        return requires
    if isa != host_isa():
        reason = f"torch {torch.__version__} compiles for this machine's processor only"
        raise TargetUnavailable(target="cpu", reason=reason, fix="use torch 2.13, or leave isa unset")
    return {**requires, "flags": processor_flags()}


class _Inlined(nn.Module):
    """A block whose remaining dialect ops run as their reference, so that Inductor fuses them."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__()
        self.gm = gm

    def forward(self, *args: Any) -> Any:
        return _Inliner(self.gm).run(*args)


class _Inliner(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        op = ops.find(target)
        if op is not None and not op.mutates and not op.name.startswith("cached_"):
            return op.reference(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _compile(gm: GraphModule, isa: str) -> Path:
    """AOTInductor package of one block, from the cache or built."""
    graph = to_json(gm)
    key = {"kind": "cpu-block", "isa": isa, "torch": str(torch.__version__), "graph": graph}

    def build(out: Path) -> None:
        (out / "block.json").write_text(json.dumps(graph, indent=1))
        _aoti(gm, isa, out / "block.pt2")

    return cached(key, build) / "block.pt2"


def march_can_be_set() -> bool:
    """Whether this torch can compile for another processor than this machine's (2.13 can, 2.11 cannot)."""
    import torch._inductor.config

    return hasattr(torch._inductor.config.cpp, "march")


def _aoti(gm: GraphModule, isa: str, package: Path) -> None:
    import torch._inductor

    examples, dynamic = _examples(gm)
    config: dict[str, Any] = {"cpp.simdlen": SIMD_BITS[isa], "cpp.dynamic_threads": True}
    config["cpp.cxx"] = (None, find_compiler())
    if march_can_be_set():
        config["cpp.march"] = isa
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about how it stores specs
            program = torch.export.export(_Inlined(gm), tuple(examples), dynamic_shapes=(tuple(dynamic),), strict=False)
            torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=config)
    except Exception as err:  # Inductor raises many unrelated types; each means that this block cannot be compiled
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise NativeBuildFailed(what_="a block", target="cpu", reason=reason, log=package.parent) from err


def _examples(gm: GraphModule) -> tuple[list[Tensor], list[dict[int, Any] | None]]:
    """Fake example inputs with the recorded shapes, and which of their dimensions are dynamic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    examples: list[Tensor] = []
    dynamic: list[dict[int, Any] | None] = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        shape, moving = [], {}
        for i, size in enumerate(value(node).shape):
            if isinstance(size, int):
                shape.append(size)
                continue
            name = re.sub(r"\W", "_", str(size))  # a size that is computed is one of its own to the compiled code
            # different symbols get different example sizes, or export would take them for one
            shape.append(sizes.setdefault(name, 11 + 2 * len(sizes)))
            moving[i] = dims.setdefault(name, torch.export.Dim(name, min=1, max=MAX_SIZE))
        with mode:
            examples.append(torch.empty(shape, dtype=value(node).dtype))
        dynamic.append(moving or None)
    return examples, dynamic


CPU = CpuTarget()
