"""From a model to a bundle: capture, passes, native code, weights, report, written in one atomic step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

import deepinfer_compile
from deepinfer_compile.arena import peak_bytes
from deepinfer_compile.bundle import (
    LEDGER,
    BundleFiles,
    BundleWriter,
    DictSource,
    Ledger,
    Manifest,
    WeightItem,
    WeightSource,
    constants_table,
    plan_weights,
    read_bundle,
    split_shards,
    weight_items,
    with_derived,
)
from deepinfer_compile.capture import capture
from deepinfer_compile.capture.source import ModelSource, open_source
from deepinfer_compile.errors import BadOption, TargetUnavailable, UnsupportedConstruct
from deepinfer_compile.graph import is_op, place_of
from deepinfer_compile.graphjson import to_json
from deepinfer_compile.ops import COMBINE, DISPATCH
from deepinfer_compile.phases import crossover, phase_programs
from deepinfer_compile.pipeline import Observer, Pipeline, Record
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.programjson import program_to_json
from deepinfer_compile.replay import result, vocabulary
from deepinfer_compile.report import write_report
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.interpret import known_namespace
from deepinfer_compile.settings import BuildSettings, ExpertPlan
from deepinfer_compile.targets import get_target
from deepinfer_compile.targets.base import Job, Target, Variant

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """Everything but weights: the programs of a model and how they came about."""

    source: ModelSource
    captured: Program
    programs: dict[str, Program]
    records: dict[str, list[Record]]
    seconds: dict[str, float] = field(default_factory=dict)


def compile_model(
    model: nn.Module | str | Path,
    settings: BuildSettings,
    pipeline: Pipeline | None = None,
    observers: Sequence[Observer] = (),
    progress: Progress = lambda text: None,
) -> Compiled:
    """Capture a model and run the passes up to the phase programs. Raises BadOption for weights that are nowhere."""
    begin = time.perf_counter()
    progress("open")
    source = open_source(model, settings.dtype)
    progress("capture")
    captured = with_constants(capture(source.model, trim=settings.trim), source)
    _refuse_without_values(source, captured, settings)
    captured_at = time.perf_counter()
    progress("passes")
    options = {name: getattr(settings, name) for name in ("waive", "replay", "keep", "experts")}
    packed, records = (pipeline or default()).run(captured, settings=options, observers=observers)
    programs, phase_records = phase_programs(packed, options, observers)
    done = time.perf_counter()
    seconds = {"capture": captured_at - begin, "passes": done - captured_at}
    return Compiled(source, captured, programs, {"packed": records, **phase_records}, seconds)


def with_constants(program: Program, source: ModelSource) -> Program:
    """Put the values of computed buffers into the program (capture on the meta device only knows their shapes)."""
    weights = dict(program.weights)
    for hole, ref in weights.items():
        if ref.name in source.constants:
            weights[hole] = type(ref)(ref.name, ref.dtype, ref.shape, source.constants[ref.name])
    return type(program)(**{**program.__dict__, "weights": weights})


def build(
    model: nn.Module | str | Path,
    out: str | Path,
    target: str | Sequence[str] = "cpu",
    *,
    pipeline: Pipeline | None = None,
    observers: Sequence[Observer] = (),
    progress: Progress = lambda text: None,
    **settings: Any,
) -> BundleFiles:
    """Build a bundle at `out` from a Hugging Face folder or a module, for one target or several.

    Options are the fields of BuildSettings. An existing bundle at `out` is replaced only when the new one is complete.
    Raises what capture, passes, targets and weights raise; nothing is left behind then.
    """
    options = BuildSettings.of(**settings)
    targets = [get_target(t) for t in ([target] if isinstance(target, str) else target)]
    if not targets:
        raise BadOption(name="target", value=target, reason="it names no target", fix="use target='cpu'")
    with BundleWriter(Path(out)) as writer:
        compiled = compile_model(model, options, pipeline, observers, progress)
        blocks, files = _program_files(compiled)
        for path, data in files.items():
            writer.add_json(path, data)
        variants = [_variant(t, compiled, blocks, options, progress) for t in targets]
        for variant in variants:
            for path, file in variant.files.items():
                writer.add_file(path, file)
        progress("weights")
        ledger = _write_weights(writer, compiled, options)
        manifest = _manifest(compiled, options, variants, ledger)
        _write_tokenizer(writer, compiled.source)
        for path, text in write_report(compiled, manifest).items():
            writer.add_bytes(path, text.encode())
        progress("finish")
        written = writer.finish(manifest)
    return read_bundle(written)


def block_hash(gm: GraphModule) -> str:
    """SHA-256 of a block's data form."""
    return sha256(json.dumps(to_json(gm), sort_keys=True).encode()).hexdigest()


def _check_portable(block: str, gm: GraphModule) -> None:
    """Every call is one that a bundle may hold. Raises UnsupportedConstruct."""
    for node in gm.graph.nodes:
        namespace = getattr(node.target, "namespace", "")
        if node.op == "call_function" and namespace and not known_namespace(namespace):
            raise UnsupportedConstruct(
                construct=f"{node.target} in block {block}, an operation of another package that no pass replaced",
                fix="see what raising missed with `deepinfer-compile explain`",
                where=place_of(node),
            )


def is_exchange(node: Node) -> bool:
    """Whether a node of a block waits for other ranks, so that the block is not compiled."""
    return is_op(node, DISPATCH.overload, COMBINE.overload)


def _program_files(compiled: Compiled) -> tuple[dict[str, GraphModule], dict[str, Any]]:
    """Distinct blocks over all programs by hash, and the program files of the bundle."""
    blocks: dict[str, GraphModule] = {}
    files: dict[str, Any] = {}
    for name, program in compiled.programs.items():
        data = program_to_json(program)
        names = {}
        for block, gm in program.blocks.items():
            digest = block_hash(gm)
            if digest not in blocks:
                _check_portable(block, gm)
            blocks.setdefault(digest, gm)
            names[block] = digest
        for digest in names.values():
            files[f"programs/blocks/{digest}.json"] = to_json(blocks[digest])
        files[f"programs/{name}.json"] = {**data, "blocks": names}
    return blocks, files


def _variant(
    target: Target, compiled: Compiled, blocks: dict[str, GraphModule], options: BuildSettings, progress: Progress
) -> Variant:
    """Lower every distinct block for a target and compile it."""
    if not options.native:
        return Variant(target.name, False, notes=("built with native=False: graphs run on reference operations",))
    missing = target.missing()
    if missing is not None:
        raise TargetUnavailable(target=target.name, reason=missing.splitlines()[0], fix="build with native=False")
    lowering = target.prepare(options.isa)
    lowered: dict[str, GraphModule] = {}
    callers: dict[str, tuple[str, ...]] = {}
    for name, program in compiled.programs.items():
        native = {block: gm for block, gm in program.blocks.items() if not any(map(is_exchange, gm.graph.nodes))}
        low, records = Pipeline(lowering, given=program.facts).run(program)
        compiled.records[f"{target.name}/{name}"] = records
        for block, gm in native.items():
            digest = block_hash(gm)
            lowered.setdefault(digest, low.blocks[block])
            if name not in callers.setdefault(digest, ()):
                callers[digest] += (name,)
    tuned = str(options.tuned) if options.tuned is not None else None
    logits = result(next(iter(compiled.programs.values())))
    made = target.build(Job(lowered, callers, options.isa, tuned, logits), progress)
    if tuned is not None and not made.tuning:
        note = f"no configuration is from {Path(tuned).name}: it has none that this build of {made.target} can use"
        made = replace(made, notes=(*made.notes, note))
    return made


def _write_weights(writer: BundleWriter, compiled: Compiled, options: BuildSettings) -> Ledger:
    """Stream the checkpoint's tensors and the program's own constants into the bundle."""
    refs = {r.name: r for p in compiled.programs.values() for r in p.weights.values()}
    source = compiled.source.weights
    whole = {n: r for n, r in refs.items() if r.value is None and r.recipe is None}
    derived = {n: r.recipe for n, r in refs.items() if r.recipe is not None}
    parts = {p.name: p for r in refs.values() for p in r.parts if p.name not in whole}
    wanted = {n: (r.dtype, r.whole) for n, r in (whole | parts).items()}
    constants = {n: r.value for n, r in refs.items() if r.value is not None}
    tied = compiled.captured.info.get("tied", [])
    # every name of a tied group is wanted, so that a checkpoint may hold any of them
    for group in tied:
        spec = next((wanted[n] for n in group if n in wanted), None)
        wanted.update({n: spec for n in group if spec is not None})
    ledger = with_derived(plan_weights(wanted, source, tied), derived, parts)
    own = [WeightItem.of(n, t.contiguous()) for n, t in constants.items() if t is not None]
    if own:
        writer.add_weights("constants", own)
    if options.weights == "copy":
        for shard, items in split_shards(weight_items(ledger, source)):
            writer.add_weights(shard, items)
    kept = tuple(sorted(constants))
    ledger = Ledger(ledger.recipes, ledger.tied, kept, ledger.ignored, ledger.notes)
    writer.add_json(LEDGER, ledger.to_json())
    return ledger


def _refuse_without_values(source: ModelSource, captured: Program, options: BuildSettings) -> None:
    """What is on the meta device cannot be written. Raises BadOption."""
    empty = source.weights.empty() if options.weights != "none" and isinstance(source.weights, DictSource) else []
    refs = captured.weights.values()
    lost = [r.name for r in refs if r.value is not None and r.value.is_meta]
    wanted = {r.name for r in refs if r.value is None}
    without = [*lost, *(n for n in empty if n in wanted)]
    if without:
        raise BadOption(
            name="weights",
            value=options.weights,
            reason=f"{without[0]} and {len(without) - 1} other tensors are on the meta device and hold nothing",
            fix="give the model its weights" + ("" if lost else ', or use weights="none" and load(checkpoint=...)'),
        )


def _write_tokenizer(writer: BundleWriter, source: ModelSource) -> None:
    if not source.tokenizer or source.folder is None:
        return
    writer.add_file("tokenizer/tokenizer.json", source.folder / "tokenizer.json")
    writer.add_json("tokenizer/tokenizer_config.json", source.tokenizer["config"])


def _manifest(compiled: Compiled, options: BuildSettings, variants: Sequence[Variant], ledger: Ledger) -> Manifest:
    source, first = compiled.source, next(iter(compiled.programs.values()))
    # a model's own tables may end before its stated context
    context = min(source.context, int(compiled.captured.info.get("max_tokens", source.context)))
    limit = options.max_model_len or context
    if limit > context:
        raise BadOption(name="max_model_len", value=limit, reason=f"the model's context is {context}", fix="lower it")
    names = {r.name: (r.dtype, r.whole) for p in compiled.programs.values() for r in p.weights.values()}
    for group in ledger.tied:
        spec = next((names[n] for n in group if n in names), None)
        names.update({n: spec for n in group if spec is not None})
    tokenizer = {k: v for k, v in source.tokenizer.items() if k != "config"}
    return Manifest(
        model={
            "name": source.name,
            "vocab_size": vocabulary(first),
            "max_model_len": limit,
            "eos_token_ids": list(source.eos_token_ids),
            "windows": list(first.windows),
            "crossover": crossover(first),
            "info": compiled.captured.info,
        },
        programs={name: {"file": f"programs/{name}.json"} for name in compiled.programs},
        variants={v.target: _variant_record(v) for v in variants},
        experts=_expert_section(compiled, options.experts),
        caches={"page_size": PAGE_SIZE, "inputs": [c.name for c in first.caches]},
        arena={name: peak_bytes(program) for name, program in compiled.programs.items()},
        tuning={v.target: v.tuning for v in variants if v.tuning},
        tokenizer=tokenizer,
        build={
            "version": deepinfer_compile.__version__,
            "torch": str(torch.__version__),
            "seconds": {k: round(v, 3) for k, v in compiled.seconds.items()},
            "passes": {k: [_record(r) for r in records] for k, records in compiled.records.items()},
        },
        tied=ledger.tied,
        constants=constants_table(names),
        waivers=tuple(r.waived for records in compiled.records.values() for r in records if r.waived),
        weights=WeightSource(
            options.weights, str(source.folder.resolve()) if options.weights == "link" and source.folder else ""
        ),
    )


def _expert_section(compiled: Compiled, plan: ExpertPlan | None) -> dict[str, Any]:
    """Where the experts are: as the program that reads prompts has them, and as the others do on ranks of their own."""
    if plan is None:
        return {}
    found = {name: program.info["experts"] for name, program in compiled.programs.items()}
    return found["prefill"] if plan.decode is None else {**found["prefill"], "decode": found["decode"]}


def _variant_record(v: Variant) -> dict[str, Any]:
    seconds = {k: round(s, 3) for k, s in v.seconds.items()}
    return {
        "native": v.native, "requires": v.requires, "blocks": v.blocks, "kernels": v.kernels, "sampler": v.sampler,
        "libraries": list(v.libraries), "seconds": seconds, "notes": list(v.notes),
    }  # fmt: skip


def _record(r: Record) -> dict[str, Any]:
    return {
        "name": r.name, "options": {k: repr(v) for k, v in r.options.items()}, "source": r.source,
        "seconds": round(r.seconds, 4), "nodes": [r.nodes_before, r.nodes_after],
        "applied": r.count("applied"), "missed": [[m.graph, m.node, m.reason] for m in r.remarks if m.kind == "missed"],
    }  # fmt: skip


__all__ = ["Compiled", "build", "compile_model"]
