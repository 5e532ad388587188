"""What a MODEL argument may be: a folder with weights, a folder with only config.json, or an architecture's name.

Only the graph is needed to explain or dump a model, so a configuration is enough: the model is made on the meta device
and nothing is allocated. A name gives Transformers' default configuration; where values are needed too (replay and
bisect), it gives the tiny random model of that architecture instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.builder import Compiled, with_constants
from deepinfer_compile.bundle import Checkpoint, DictSource, execute, plan_weights
from deepinfer_compile.capture import capture, hf
from deepinfer_compile.capture.source import DEFAULT_CONTEXT, ModelSource, concrete_buffers, meta_model, open_source
from deepinfer_compile.errors import BadOption, UnsupportedArchitecture
from deepinfer_compile.models import more, tiny
from deepinfer_compile.phases import phase_programs
from deepinfer_compile.pipeline import Observer, Pipeline
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import random_weights, weights_from
from deepinfer_compile.runtime.loading import free_memory

REPLAY_BYTES = 4 + 8
"""What a replay holds of each weight: its own value (at most 4 bytes) and the one widened to fp64."""


@dataclass(frozen=True)
class Subject:
    """A captured model with values for its weights. random: they are random, not the model's own."""

    name: str
    program: Program
    weights: dict[str, Tensor]
    random: bool


def open_graph(model: str) -> ModelSource:
    """A model for its graph only; nothing is allocated. Raises NotAModelFolder, UnsupportedArchitecture."""
    folder = Path(model)
    folder = folder.parent if folder.name == "config.json" and folder.is_file() else folder
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return open_source(folder)
    config = _folder_config(folder) if (folder / "config.json").is_file() else _named_config(model)
    dtype = getattr(config.get_text_config(), "dtype", None)
    made = meta_model(config, dtype if dtype in (torch.float32, torch.bfloat16) else torch.bfloat16)
    context = int(getattr(made.config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    return ModelSource(type(made).__name__, made, DictSource({}), concrete_buffers(made), context)


def _folder_config(folder: Path) -> Any:
    package = hf.transformers()
    try:
        return package.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as err:
        reason, fix = str(err).splitlines()[0], "upgrade transformers, or check config.json"
        raise UnsupportedArchitecture(name=folder, reason=reason, fix=fix) from None


def _named_config(name: str) -> Any:
    package = hf.transformers()
    if Path(name).exists() or "/" in name:
        open_source(name)  # raises: it is no model folder
    known = list(package.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    wanted = name if name in known else name.replace("-", "_")
    if wanted not in known:
        raise _unknown(name, known)
    return package.AutoConfig.for_model(wanted)


def _unknown(name: str, known: Sequence[str]) -> UnsupportedArchitecture:
    near = difflib.get_close_matches(name, known, 3)
    fix = f"did you mean {' or '.join(near)}?" if near else "give a folder with config.json, or an architecture's name"
    reason = "there is no such folder, and Transformers has no architecture of this name"
    return UnsupportedArchitecture(name=name, reason=reason, fix=fix)


def compile_source(source: ModelSource, waive: tuple[str, ...] = (), observers: Sequence[Observer] = ()) -> Compiled:
    """Capture a source and run the passes, phases included."""
    captured = with_constants(capture(source.model), source)
    options = {"waive": waive}
    packed, records = default().run(captured, settings=options, observers=observers)
    programs, phase_records = phase_programs(packed, options, observers)
    return Compiled(source, captured, programs, {"packed": records, **phase_records})


def open_values(model: str, *, random: bool = False) -> Subject:
    """A captured model with weights: a folder's own, random ones for a folder without, or a tiny model by name.

    Raises BadOption when the weights would not fit into memory in fp64, and what `open_graph` raises.
    """
    if not Path(model).exists() and (model in tiny.CONFIGS or model in more.MORE):
        made = tiny.make(model)
        return Subject(f"tiny random {model}", capture(made), weights_from(made), True)
    source = open_graph(model)
    program = with_constants(capture(source.model), source)
    count = sum(_size(r.shape) for r in program.weights.values() if r.value is None)
    need, free = count * REPLAY_BYTES, free_memory()
    if need > free:
        reason = f"replay in fp64 needs {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise BadOption(name="model", value=model, reason=reason, fix="name a tiny model by its architecture instead")
    if random or not isinstance(source.weights, Checkpoint):
        return Subject(source.name, program, random_weights(program), True)
    return Subject(source.name, program, _folder_weights(program, source.weights), False)


def _folder_weights(program: Program, checkpoint: Checkpoint) -> dict[str, Tensor]:
    tied = [g for g in program.info.get("tied", []) if len(g) > 1]
    wanted = {r.name: (r.dtype, r.shape) for r in program.weights.values() if r.value is None}
    for group in tied:
        spec = next((wanted[n] for n in group if n in wanted), None)
        wanted.update({n: spec for n in group if spec is not None})
    ledger = plan_weights(wanted, checkpoint, tied)
    return {name: execute(ledger.recipe(name), checkpoint) for name in wanted}


def _size(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= int(n)
    return count


def named_pipeline(path: str) -> Pipeline:
    """The Pipeline that `module:object` names (or that the object, called, returns). Raises BadOption."""
    import importlib
    import os
    import sys

    module, _, name = path.partition(":")
    fix = "write module:object, where object is a Pipeline or returns one"
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as err:
        raise BadOption(name="--pipeline", value=path, reason=str(err), fix=fix) from None
    finally:
        sys.path.remove(os.getcwd())
    made = found if isinstance(found, Pipeline) or not callable(found) else found()
    if not isinstance(made, Pipeline):
        raise BadOption(name="--pipeline", value=path, reason=f"it is a {type(made).__name__}", fix=fix)
    return made


__all__ = ["Subject", "compile_source", "named_pipeline", "open_graph", "open_values"]
