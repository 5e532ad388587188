"""NVIDIA GPUs: dialect operations become Triton kernels, compiled to cubins on any Linux box, with no GPU and no CUDA.

A block's file in the bundle is its graph and, for every program that calls the block, which node has which kernel at
how many tokens and which nodes were left, with the reason. What is left runs as the operation that the graph names.
Configs are chosen for a ladder of token counts, so that a server with one CUDA graph per count finds the best kernel
for each; equal choices share one binary.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from deepinfer_compile.artifacts import cached
from deepinfer_compile.errors import KernelTooLarge
from deepinfer_compile.graph import target_name
from deepinfer_compile.graphjson import to_json
from deepinfer_compile.kernels import (
    AnySpec,
    Call,
    Limits,
    Refused,
    call_of,
    choices,
    fields_of,
    is_large,
    select,
    type_name,
)
from deepinfer_compile.ops import LINEAR, LINEARS, OUTPUT_PROJECTION, SAMPLE
from deepinfer_compile.ops.sample import NUMBERS
from deepinfer_compile.passbase import Pass
from deepinfer_compile.passes.merge_linears import MergeLinears
from deepinfer_compile.runtime.kernel_blocks import LIBRARY
from deepinfer_compile.targets.base import Job, Variant
from deepinfer_compile.targets.triton_compiler import DIALECT, Kernel, TritonCompiler, missing_tools
from deepinfer_compile.templates.linears import MOST as MERGED
from deepinfer_compile.tuned import Chosen, Tuned

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
"""Numbers of tokens for which a kernel's config is chosen."""
OLDEST_TRITON = (3, 6)
ATTEMPTS = 12
"""Configurations that are tried in place of one that does not fit."""
BLOCK = "block.json"
PLAIN = (LINEAR, LINEARS)
"""ATen's linear layers, of which most are better left: not counted among the dialect's operations."""


@dataclass(frozen=True)
class NvidiaTarget:
    """One GPU architecture. capability: what CUDA calls it; its binaries run on exactly that one."""

    name: str
    capability: tuple[int, int]
    limits: Limits

    def missing(self) -> str | None:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return f"kernels are compiled on Linux x86-64, this is {platform.system()} {platform.machine()}"
        lack = missing_tools()
        if lack is None and _numbers(metadata.version("triton")) < OLDEST_TRITON:
            return f"triton {metadata.version('triton')} is older than {'.'.join(map(str, OLDEST_TRITON))}"
        return lack

    def prepare(self, isa: str | None) -> tuple[Pass, ...]:
        return (MergeLinears(one="aten.linear", many="deepinfer.linears", most=MERGED, large=True),)

    def build(self, job: Job, progress: Callable[[str], None]) -> Variant:
        made = _Made(self, progress, Tuned(job.tuned, self.name, self.limits) if job.tuned is not None else None)
        arch = self.capability[0] * 10 + self.capability[1]
        version = metadata.version("triton")
        blocks, files = {}, {}
        with TritonCompiler(self.name, arch, self.limits.shared_bytes, version) as compiler:
            for digest, gm in job.blocks.items():
                programs = {name: made.assign(gm, name, compiler) for name in job.programs[digest]}
                blocks[digest] = f"kernels/{self.name}/{digest[:16]}/{BLOCK}"
                files[blocks[digest]] = _block_file({"graph": to_json(gm), "programs": programs})
            sampler = made.sampler(job.logits, compiler) if job.logits is not None else ""
        for name, folder in made.folders.items():
            files |= {f"kernels/{self.name}/{name}/{f.name}": f for f in sorted(folder.iterdir())}
        return Variant(
            self.name,
            True,
            {"device": self.limits.device, "capability": list(self.capability)},
            blocks,
            kernels={name: f"kernels/{self.name}/{name}/kernel.json" for name in made.folders},
            sampler=sampler,
            files=files,
            seconds=made.seconds,
            notes=made.notes(),
            tuning=made.tuning(),
        )


class _Made:
    """Kernels of one build by hash, and counts for the notes."""

    def __init__(self, target: NvidiaTarget, progress: Callable[[str], None], tuned: Tuned | None) -> None:
        self.target, self.progress, self.tuned = target, progress, tuned
        self.stored: dict[str, list[dict[str, Any]]] = {}
        self.folders: dict[str, Path] = {}
        self.seconds: dict[str, float] = {}
        self.bound: dict[str, int] = {}
        self.unbound: dict[str, Counter[str]] = {}
        self.host_draws = ""
        self.replaced: dict[str, None] = {}

    def assign(self, gm: GraphModule, program: str, compiler: TritonCompiler) -> dict[str, Any]:
        """Kernels of a block's nodes in one program, and the nodes that are left."""
        kernels: dict[str, Any] = {}
        left: dict[str, Any] = {}
        unbound = self.unbound.setdefault(program, Counter())
        for node in gm.graph.nodes:
            call = call_of(node, program)
            if call is None:
                if _computes(node):
                    left[node.name] = {"op": target_name(node), "reason": "ATen, run by torch"}
                continue
            found = _worth(call) or select(call, DIALECT)
            if isinstance(found, Refused):
                left[node.name] = {"op": target_name(node), "reason": found.reason}
                if call.op not in PLAIN:
                    unbound[target_name(node)] += 1
                continue
            spec, params = found
            names = [[c.upto, self._kernel(spec, params, c, compiler)] for c in self._choices(spec, params)]
            names += [] if spec.few is None else [[None, LIBRARY]]
            kernels[node.name] = {"op": target_name(node), "kernel": spec.name, "choices": names}
            self.bound[program] = self.bound.get(program, 0) + (call.op not in PLAIN)
        return {"kernels": kernels, "left": left}

    def _choices(self, spec: AnySpec, params: Any) -> tuple[Chosen, ...]:
        """In rising order of tokens; the last is for any number, or for as many as the kernel is best for."""
        buckets = TOKENS if spec.few is None else tuple(n for n in TOKENS if n <= spec.few)
        if self.tuned is not None:
            found = self.tuned.choices(spec, params, buckets)
        else:
            limits = self.target.limits
            found = tuple(Chosen(upto, config) for upto, config in choices(spec, params, limits, buckets))
        return found if spec.few is None else (*found[:-1], replace(found[-1], upto=spec.few))

    def _kernel(self, spec: AnySpec, params: Any, chosen: Chosen, compiler: TritonCompiler) -> str:
        """The hash of the kernel for a choice, compiled; and where its configuration is from.

        How much memory a configuration takes is the compiler's decision: where it is too much, the nearest one that
        fits is taken, and the notes say so.
        """
        try:
            name = self._compile(Kernel.of(spec, params, chosen.config), compiler)
        except KernelTooLarge as error:
            name = self._nearest(spec, params, chosen.config, compiler, error)
            self.replaced[str(error).splitlines()[0]] = None
            return name
        told = chosen.to_json()
        if told is not None and told not in self.stored.setdefault(name, []):
            self.stored[name].append(told)
        return name

    def _nearest(self, spec: AnySpec, params: Any, config: Any, compiler: TritonCompiler, error: KernelTooLarge) -> str:
        """The kernel of the legal configuration with the fewest other values that fits. Raises the error if none of
        ATTEMPTS does."""
        wanted = fields_of(config)
        others = [c for c in spec.space(params, self.target.limits) if c != config]
        others.sort(key=lambda c: sum(wanted[name] != held for name, held in fields_of(c).items()))
        for other in others[:ATTEMPTS]:
            try:
                return self._compile(Kernel.of(spec, params, other), compiler)
            except KernelTooLarge:
                continue
        raise error

    def tuning(self) -> dict[str, Any]:
        """Where kernels' configurations were measured, by device and hash of the kernel; empty where none was."""
        return {"device": self.tuned.device, "kernels": self.stored} if self.tuned is not None and self.stored else {}

    def sampler(self, logits: Tensor, compiler: TritonCompiler) -> str:
        """The kernel that chooses tokens from the programs' logits, one for any number of rows; empty for none."""
        numbers = {name: logits.new_empty(logits.shape[0], dtype=dtype) for name, dtype in NUMBERS.items()}
        found = select(Call(SAMPLE, {"logits": logits, **numbers}, "decode"), DIALECT)
        if isinstance(found, Refused):
            self.host_draws = found.reason
            return ""
        spec, params = found
        return self._kernel(spec, params, self._choices(spec, params)[-1], compiler)

    def _compile(self, kernel: Kernel, compiler: TritonCompiler) -> str:
        name = compiler.name(kernel)
        if name not in self.folders:
            self.progress(f"kernel {len(self.folders) + 1} {kernel.spec.name}")
            begin = time.perf_counter()
            self.folders[name] = compiler.compile(kernel)
            self.seconds[name] = time.perf_counter() - begin
        return name

    def notes(self) -> tuple[str, ...]:
        """One line a program: operations of the dialect with a kernel, and those without.

        And why tokens are chosen on the host, if they are.
        """
        found = []
        for program, unbound in self.unbound.items():
            bound = self.bound.get(program, 0)
            names = ", ".join(f"{name} {count}" for name, count in sorted(unbound.items()))
            rest = f"; without: {names}" if names else ""
            found.append(f"{program}: {bound} of {bound + unbound.total()} dialect calls have a kernel{rest}")
        if self.host_draws:
            found.append(f"tokens are chosen on the host: {self.host_draws}")
        found += [f"the nearest configuration that fits was taken: {why}" for why in self.replaced]
        ignored = self.tuned.ignored if self.tuned is not None else ()
        return (*found, *(f"tuning record not used: {reason}" for reason in ignored))


def _worth(call: Call) -> Refused | None:
    """Why a layer is torch's at any number of tokens, if it is. Of several weights MergeLinears has seen to that."""
    if call.op not in (LINEAR, OUTPUT_PROJECTION) or is_large(call.arguments["weight"]):
        return None
    dtype = type_name(call.arguments["weight"].dtype)
    return Refused("too small for a launch of ours" if dtype == "bfloat16" else f"{dtype} products are torch's")


def _computes(node: Node) -> bool:
    """Whether a node that calls no operation of the dialect does work: views and tuple items do not."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return not any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def _block_file(content: dict[str, Any]) -> Path:
    """A block's description as a file of the build cache."""

    def write(folder: Path) -> None:
        (folder / BLOCK).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")

    return cached({"kind": "gpu-block", "content": content}, write) / BLOCK


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _limits(cores: int, read_bytes: float, flops: float) -> Limits:
    """227 KiB of shared memory and 32 warps for a program."""
    return Limits(
        ("float32", "bfloat16"),
        "cuda",
        shared_bytes=227 * 1024,
        cores=cores,
        max_warps=32,
        read_bytes=read_bytes,
        flops=flops,
        pdl=True,
    )


# an H200's measured rates; a B200's from its data sheet
SM90 = NvidiaTarget("nvidia-sm90", (9, 0), _limits(132, 4.5e12, 7.5e14))
SM100 = NvidiaTarget("nvidia-sm100", (10, 0), _limits(148, 8.0e12, 2.25e15))
