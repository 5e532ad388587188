"""The ONNX file: weights inside or in a data file beside it, checked, then put in place in one step."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

import deepinfer_compile
from deepinfer_compile.bundle import execute, plan_weights
from deepinfer_compile.bundle.files import sync_folder
from deepinfer_compile.bundle.replace import FolderLock, new_sibling, remove_leftovers
from deepinfer_compile.capture.source import ModelSource
from deepinfer_compile.errors import ExportInvalid, MissingExtra, OutputFailed
from deepinfer_compile.observe import TOLERANCES, relative
from deepinfer_compile.onnx_graph import IR_VERSION, OPSET, Emitter, onnx_type, tensor_proto
from deepinfer_compile.program import Program, WeightRef
from deepinfer_compile.replay import logits_of, sample_length

INLINE_BYTES = 1_800_000_000
"""Weights up to this are stored in the model file; protobuf ends at 2 GiB."""
ALIGNMENT = 4096
"""Where tensors begin in a data file, so that runtimes can map them."""
TOKENS = "tokens"
Make = Callable[[str], Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written. weight_bytes: of all tensors. data: the data file, if there is one. errors: of the check at
    each length, the largest difference of logits over the largest logit."""

    path: Path
    inputs: tuple[str, ...]
    nodes: int
    weight_bytes: int
    data: Path | None
    errors: dict[int, float]


@dataclass(frozen=True)
class Initialiser:
    """What an initialiser stands for: a tensor, or the real or imaginary part of a complex one."""

    ref: WeightRef
    part: Literal["", "real", "imag"] = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype.to_real() if self.part else self.ref.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.ref.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OnnxGraph:
    """Nodes of a whole model. weights: initialisers by name."""

    emitter: Emitter
    inputs: tuple[str, ...]
    output_type: int
    vocabulary: int
    weights: dict[str, Initialiser]


def write_model(
    graph: OnnxGraph, program: Program, source: ModelSource, target: Path, inline_bytes: int, verify: bool
) -> Exported:
    """Write, check and put in place. Raises OutputBusy, OutputFailed, ExportInvalid, and what weights raise."""
    runtime = _runtime() if verify else None
    make = _weights(graph, program, source)
    with _reporting(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(target)
    try:
        with _reporting(target):
            remove_leftovers(target)
            scratch = new_sibling(target, "tmp")
            scratch.mkdir()
        try:
            return _write(graph, program, source.name, make, scratch, target, inline_bytes, runtime)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        lock.release()


def _weights(graph: OnnxGraph, program: Program, source: ModelSource) -> Make:
    """How each initialiser is made, all names, dtypes and shapes proven. Raises MissingWeight, WeightMismatch."""
    refs = {i.ref.name: i.ref for i in graph.weights.values()}
    wanted = {n: (r.dtype, r.shape) for n, r in refs.items() if r.value is None}
    tied = [g for g in program.info.get("tied", []) if len(g) > 1]
    # every name of a tied group is wanted, so that a checkpoint may hold any of them
    for group in tied:
        spec = next((wanted[n] for n in group if n in wanted), None)
        wanted.update({n: spec for n in group if spec is not None})
    ledger = plan_weights(wanted, source.weights, tied)

    def make(name: str) -> Tensor:
        ref, part = graph.weights[name].ref, graph.weights[name].part
        held = ref.value if ref.value is not None else execute(ledger.recipe(ref.name), source.weights)
        return (getattr(held, part) if part else held).contiguous()

    return make


def _write(
    graph: OnnxGraph,
    program: Program,
    name: str,
    make: Make,
    scratch: Path,
    target: Path,
    inline_bytes: int,
    runtime: Any,
) -> Exported:
    size = sum(i.nbytes for i in graph.weights.values())
    draft, data = scratch / target.name, None
    with _reporting(target):
        if size > inline_bytes:
            initialisers, data = _data_file(graph, make, scratch, target)
        else:
            initialisers = [tensor_proto(n, make(n)) for n in graph.weights]
        _save(_model(graph, program, name, initialisers), draft)
    _check(draft, target)
    errors = {} if runtime is None else _compare(runtime, draft, graph, program, make, target)
    with _reporting(target):
        if data is not None:
            os.replace(data, target.parent / data.name)
        os.replace(draft, target)
        sync_folder(target.parent)
    placed = target.parent / data.name if data is not None else None
    return Exported(target, graph.inputs, len(graph.emitter.nodes), size, placed, errors)


def _data_file(graph: OnnxGraph, make: Make, scratch: Path, target: Path) -> tuple[list[TensorProto], Path]:
    """All weights in one file, each made when its turn comes; the file is named by what is in it."""
    places: dict[str, tuple[int, int]] = {}
    digest = hashlib.sha256()
    with (scratch / "data").open("wb") as file:
        for name in graph.weights:
            gap = bytes(-file.tell() % ALIGNMENT)
            raw = make(name).reshape(-1).view(torch.uint8).numpy().data
            places[name] = (file.tell() + len(gap), len(raw))
            for part in (gap, raw):
                file.write(part)
                digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    path = scratch / f"{target.stem}-{digest.hexdigest()[:16]}.data"
    (scratch / "data").rename(path)
    return [_external(n, r, path.name, *places[n]) for n, r in graph.weights.items()], path


def _external(name: str, held: Initialiser, file: str, offset: int, length: int) -> TensorProto:
    """An initialiser whose bytes lie in a data file."""
    proto = TensorProto(name=name, data_type=onnx_type(held.dtype), dims=held.ref.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, said in (("location", file), ("offset", offset), ("length", length)):
        entry = proto.external_data.add()
        entry.key, entry.value = key, str(said)
    return proto


def _model(graph: OnnxGraph, program: Program, name: str, initialisers: list[TensorProto]) -> onnx.ModelProto:
    g = graph.emitter
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, [1, TOKENS]) for n in graph.inputs]
    output = helper.make_tensor_value_info("logits", graph.output_type, [1, TOKENS, graph.vocabulary])
    body = helper.make_graph(g.nodes, name, inputs, [output], [*g.constants.values(), *initialisers])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    model.producer_name, model.producer_version = "deepinfer-compile", deepinfer_compile.__version__
    helper.set_model_props(model, {k: str(program.info[k]) for k in ("model", "max_tokens") if k in program.info})
    return model


def _save(model: onnx.ModelProto, path: Path) -> None:
    with path.open("wb") as file:
        file.write(model.SerializeToString())
        file.flush()
        os.fsync(file.fileno())


def _check(draft: Path, target: Path) -> None:
    """Raises ExportInvalid unless onnx's own checker and shape inference accept the model."""
    try:
        onnx.checker.check_model(str(draft), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportInvalid(path=target, reason=str(error).strip().splitlines()[0]) from error


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        purpose = "running an exported model to verify it"
        raise MissingExtra(package="onnxruntime", purpose=purpose, extra="onnx-runtime") from None
    return onnxruntime


def _compare(
    runtime: Any, draft: Path, graph: OnnxGraph, program: Program, make: Make, target: Path
) -> dict[int, float]:
    """Errors against our program's reference at two lengths. Raises ExportInvalid beyond the tolerance."""
    weights = {n: make(n) for n, i in graph.weights.items() if not i.part}
    halves = {i.ref.name for i in graph.weights.values() if i.part}
    weights |= {n: torch.complex(make(f"{n}.real"), make(f"{n}.imag")) for n in halves}
    dtype = next(i.dtype for i in graph.weights.values() if i.dtype.is_floating_point)
    try:
        session = runtime.InferenceSession(str(draft), providers=["CPUExecutionProvider"])
        errors = {n: _error(session, graph, program, weights, n) for n in (5, sample_length(program))}
    except Exception as error:  # onnxruntime's own types; each means that it cannot run the model
        raise ExportInvalid(path=target, reason=f"onnxruntime: {str(error).strip().splitlines()[0]}") from error
    worst = max(errors.values())
    if not worst <= TOLERANCES[dtype]:
        reason = f"in onnxruntime its logits differ by {worst:.1e} (limit {TOLERANCES[dtype]:.0e})"
        raise ExportInvalid(path=target, reason=reason)
    return errors


def _error(session: Any, graph: OnnxGraph, program: Program, weights: dict[str, Tensor], count: int) -> float:
    ids = torch.randint(0, graph.vocabulary, (1, count), generator=torch.Generator().manual_seed(5))
    given = {"input_ids": ids, "position_ids": torch.arange(count)[None]}
    got = session.run(["logits"], {n: given[n].numpy() for n in graph.inputs})[0]
    wanted = logits_of(program, weights, ids[0].tolist(), range(count))
    return relative(torch.from_numpy(got).reshape(count, -1), wanted.reshape(count, -1))


@contextmanager
def _reporting(target: Path) -> Iterator[None]:
    """Turn a failing disk or a missing permission into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(path=target, reason=str(error.strerror or error)) from error
