"""Load a bundle: check, bind, allocate nothing large before all checks passed. No tracing, no compiling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import deepinfer_compile.ops  # noqa: F401  (graphs name the dialect's operations)
from deepinfer_compile.bundle import BundleFiles, read_bundle
from deepinfer_compile.errors import (
    BadOption,
    BundleCorrupt,
    ContextTooLong,
    MissingWeight,
)
from deepinfer_compile.runtime.bundled import BundleLLM, identity_of
from deepinfer_compile.runtime.drawing import Draw, KernelDraw
from deepinfer_compile.runtime.executor import BundleExecutor, Graphs, ProgramRunner, Runner
from deepinfer_compile.runtime.interpret import GraphFunction
from deepinfer_compile.runtime.kernel_blocks import KernelRunner, StepState, kernel_block, kernel_record, waits
from deepinfer_compile.runtime.native import load_kernels
from deepinfer_compile.runtime.ranks import Ranks, neighbours
from deepinfer_compile.runtime.shares import executor_type, part_of, parts_of, programs_of, share_of
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from deepinfer_compile.runtime.stored import Stored, block_file, read_programs
from deepinfer_compile.runtime.text import TextCodec
from deepinfer_compile.runtime.unit import Unit
from deepinfer_compile.runtime.variants import device_kind, device_of, variant_of, variant_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepinfer_compile.eplb.placement import Ints, Placement
    from deepinfer_compile.runtime.rebalance import Rebalance


def load(
    path: str | Path,
    *,
    target: str | None = None,
    native: bool = True,
    check: str = "lazy",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    memory_fraction: float = 0.5,
    enable_prefix_caching: bool = True,
    prefix_cache_ttl: float = 180.0,
    prefix_cache_folder: str | Path | None = None,
    prefix_cache_bytes: int = 16 << 30,
    prefix_cache_retention: Mapping[str, float] | None = None,
    checkpoint: str | Path | None = None,
    group: ProcessGroup | None = None,
    placement: Placement | Ints | None = None,
    rebalance: Rebalance | None = None,
) -> BundleLLM:
    """Open a bundle and make it ready to generate.

    native False runs the graphs on reference operations (slow). check: "lazy" verifies all but weight data, "full" that
    too. max_model_len: context of this process, at most what was built. checkpoint: for a bundle without weights.
    memory_fraction: share of free memory for caches. enable_prefix_caching: prompts that start alike are read once;
    unused rows are kept for prefix_cache_ttl seconds, or until their place is needed. prefix_cache_folder: keeps
    prefix_cache_bytes of them for other processes. prefix_cache_retention: seconds after their last use, by
    `SamplingParams.retention`; "chat" a week, "agent" three days. group: the ranks of a bundle whose experts are
    spread, by default those of torchrun; all give the same placement, the expert in each slot ([layers, slots] with -1
    for none, or of `eplb.rebalance`; by default in order), and rebalance, when they move by their load (by default no);
    of a bundle built for two units, all of a unit give the same, and the first ranks read prompts, the others decode.
    Raises NotABundle, BundleCorrupt, BundlePath, BundleVersion, WrongTarget, WeightMismatch, OutOfMemory, BadOption,
    HandoverMismatch, RankLost.
    """
    if not 0 < memory_fraction <= 1:
        raise BadOption(name="memory_fraction", value=memory_fraction, reason="it is a share", fix="use 0 < x <= 1")
    files = read_bundle(Path(path), check)  # type: ignore[arg-type]
    stored, context = read_programs(files), _context(files, max_model_len)
    source, kind = Path(checkpoint) if checkpoint else None, device_kind(variant_of(files, target, native))
    share = share_of(files, stored, group, placement, rebalance, kind, context, source)
    executor, weights = open_executor(files, target, native, source, stored, share.spread, share.unit)
    llm = BundleLLM(
        executor,
        _codec(files),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_bytes=int(_own_memory(executor, share.ranks) * memory_fraction),
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        prefix_cache_ttl=prefix_cache_ttl,
        prefix_cache_folder=prefix_cache_folder,
        prefix_cache_bytes=prefix_cache_bytes,
        prefix_cache_retention=prefix_cache_retention,
        eos_token_ids=tuple(files.manifest.model.get("eos_token_ids", ())),
    )
    llm.ranks = executor if isinstance(executor, SpreadExecutor) else None
    llm.files, llm.weights, llm.variant = files, weights, variant_text(files, target, native)
    llm.checkpoint, llm.parts = source, parts_of(stored)
    llm.balance(rebalance)
    return llm


def _context(files: BundleFiles, max_model_len: int | None) -> int:
    """The longest context of this process. Raises ContextTooLong for one that the bundle was not built for."""
    built = int(files.manifest.model["max_model_len"])
    if max_model_len is not None and not 0 < max_model_len <= built:
        raise ContextTooLong(request="load", needed=max_model_len, limit=built, built=built)
    return max_model_len or built


def open_executor(
    files: BundleFiles,
    target: str | None = None,
    native: bool = True,
    checkpoint: Path | None = None,
    stored: Stored | None = None,
    spread: Spread | None = None,
    unit: Unit | None = None,
) -> tuple[BundleExecutor, dict[str, Tensor]]:
    """The executor of a checked bundle, and the tensors that it runs on by name; of experts, those of the rank, and of
    a rank with a role, those of its programs."""
    stored = stored or read_programs(files)
    variant = variant_of(files, target, native)
    weights = files.weights(checkpoint)
    device = device_of(variant)
    runners = _Runners(files, stored, variant, device)
    programs: dict[str, ProgramRunner] = {}
    held: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for name, data in programs_of(stored, unit).items():
        file = files.manifest.programs[name]["file"]
        for spec in data["weights"].values():
            if spec["tensor"] not in weights:
                raise MissingWeight(tensor=spec["tensor"], where=file)
            if spec["tensor"] not in held:
                # by name: another tensor may come to lie where one lay that was made for its copy alone
                main = spec["tensor"] if "experts" in spec else weights.main(spec["tensor"])
                if main not in copies:
                    copies[main] = part_of(weights, spec, spread).to(device)
                held[spec["tensor"]] = copies[main]
        bound = {block: runners.get(digest, name) for block, digest in data["blocks"].items()}
        programs[name] = ProgramRunner(data, bound, held, file)
    model = files.manifest.model
    limit, draw = int(model["max_model_len"]), runners.draw()
    make = executor_type(spread, unit)
    executor = make(
        programs,
        model["windows"],
        int(model["vocab_size"]),
        limit,
        float(model["crossover"]),
        device,
        runners.state,
        runners.graphs(limit, draw) if spread is None else None,  # other ranks may run a step of another size
        draw,
        identity_of(files, variant_text(files, target, native), checkpoint),
    )
    return executor, held


class _Runners:
    """Block runners, each made once."""

    def __init__(
        self, files: BundleFiles, stored: Stored, variant: dict[str, Any] | None, device: torch.device
    ) -> None:
        self.files, self.stored, self.variant, self.device = files, stored, variant, device
        self.made: dict[tuple[str, str], Runner] = {}
        self.kernels: dict[str, KernelRunner] = {}
        self.state = StepState()
        self.waiting: set[str] = set()
        for library in variant["libraries"] if variant else ():
            load_kernels(files.path(library))

    def get(self, digest: str, program: str) -> Runner:
        """What runs a block, by its hash, in one program."""
        of = program if self.variant is not None and self.variant["requires"].get("device", "cpu") != "cpu" else ""
        if (digest, of) not in self.made:
            if self.variant is None or _exchanges(self.stored.graphs[digest]):
                self.made[digest, of] = self._graph(digest)
            else:
                self.made[digest, of] = self._kernels(digest, program) if of else self._native(digest)
        return self.made[digest, of]

    def _file(self, digest: str) -> str:
        assert self.variant is not None
        file: str | None = self.variant["blocks"].get(digest)
        if file is None:
            raise BundleCorrupt(file="manifest.json", reason=f"no native code for block {digest[:12]}")
        return file

    def _native(self, digest: str) -> Runner:
        # the loader class itself, not torch._inductor's wrapper, which would import the compiler
        path = str(self.files.path(self._file(digest)))
        package = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
        run: Runner = package.boxed_run
        return run

    def _kernels(self, digest: str, program: str) -> Runner:
        graph, path = self.stored.graphs[digest], self._file(digest)
        made = kernel_block(self.files, path, program, graph, self._kernel, self.state, str(self.device))
        if waits(made):
            self.waiting.add(program)
        return _all_results(made)

    def _kernel(self, name: str, where: str) -> KernelRunner:
        from deepinfer_compile.runtime.cubins import Cubin

        assert self.variant is not None
        if name not in self.variant["kernels"]:
            raise BundleCorrupt(file=where, reason=f"it names the kernel {name[:80]!r}, which the manifest does not")
        if name not in self.kernels:
            self.kernels[name] = Cubin(self.files, self.variant["kernels"][name], self.device)
        return self.kernels[name]

    def draw(self) -> Draw | None:
        """What chooses tokens on the device, where the variant has a kernel for it."""
        name = self.variant.get("sampler", "") if self.variant is not None else ""
        if not name:
            return None
        kernel = self._kernel(name, "manifest.json")
        assert self.variant is not None
        path = self.variant["kernels"][name]
        if kernel_record(self.files, path).get("op") != "sample":
            raise BundleCorrupt(file=path, reason="the manifest names it to choose tokens, and it does something else")
        return KernelDraw(kernel)

    def graphs(self, max_model_len: int, draw: Draw | None) -> Graphs | None:
        """What captures steps of programs that do not wait for the device."""
        if self.device.type != "cuda":
            return None
        from deepinfer_compile.runtime.small_graphs import CudaGraphs

        return CudaGraphs(self.device, max_model_len, self.state, draw, self.waiting)

    def _graph(self, digest: str) -> Runner:
        return _all_results(GraphFunction(self.stored.graphs[digest], block_file(digest)))


def _exchanges(graph: Mapping[str, Any]) -> bool:
    """Whether a block waits for other ranks; no target compiles that."""
    return any(n.get("target") in ("deepinfer.dispatch.default", "deepinfer.combine.default") for n in graph["nodes"])


def _all_results(function: GraphFunction) -> Runner:
    def run(values: list[Any]) -> tuple[Any, ...]:
        out = function(*values)
        return out if isinstance(out, tuple) else (out,)

    return run


def _codec(files: BundleFiles) -> TextCodec | None:
    section = files.manifest.tokenizer
    if not section:
        return None
    return TextCodec.from_files(
        files.path("tokenizer/tokenizer.json"),
        json.loads(files.bytes("tokenizer/tokenizer_config.json")),
        section.get("chat_template"),
        section.get("generation_config", {}),
    )


def _own_memory(executor: BundleExecutor, ranks: Ranks) -> int:
    """Bytes that this process can allocate, where ranks beside it want as many."""
    return free_memory(executor.device) // (neighbours(ranks) if executor.device.type == "cpu" else 1)


def free_memory(device: torch.device | None = None) -> int:
    """Bytes that can be allocated: on a GPU, or in memory without swapping."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise BadOption(name="memory_fraction", value="", reason="/proc/meminfo names no free memory", fix="run on Linux")


__all__ = ["load", "open_executor"]
