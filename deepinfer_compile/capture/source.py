"""Where a model comes from: a Hugging Face folder (nothing allocated) or a module in memory."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.bundle import Checkpoint, DictSource
from deepinfer_compile.capture import hf
from deepinfer_compile.errors import NotAModelFolder, UnsupportedArchitecture, UnsupportedConstruct
from deepinfer_compile.models.own import read_folder

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class ModelSource:
    """A model to compile. `weights` provides checkpoint tensors; `constants` values of buffers no checkpoint holds."""

    name: str
    model: nn.Module
    weights: Checkpoint | DictSource
    constants: dict[str, Tensor]
    context: int
    eos_token_ids: tuple[int, ...] = ()
    folder: Path | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)


def open_source(model: nn.Module | str | Path, dtype: str = "auto") -> ModelSource:
    """A folder or a module as a source. Raises NotAModelFolder, UnsupportedArchitecture, MissingExtra."""
    if isinstance(model, nn.Module):
        return _from_module(model, dtype)
    return _from_folder(Path(model), dtype)


def _from_module(model: nn.Module, dtype: str) -> ModelSource:
    if dtype != "auto":
        model = _in_type(model, getattr(torch, dtype))
    tensors = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    tensors.update({n: b.detach() for n, b in model.named_buffers(remove_duplicate=False)})
    config = getattr(model, "config", None)
    on_meta = any(b.is_meta for b in model.buffers())
    constants = concrete_buffers(model) if on_meta and hasattr(model, "_init_weights") else {}
    return ModelSource(type(model).__name__, model, DictSource(tensors), constants, _context(config), _eos(config, {}))


def _in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module if it computes in that type, else a copy that does: the caller's stays as it is.

    Complex tensors stay complex; `Module.to` would drop their imaginary part.
    """
    held = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    if all(t.dtype == dtype for t in held):
        return model
    copied = copy.deepcopy(model)
    copied._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    return copied


def _from_folder(folder: Path, dtype: str) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise NotAModelFolder(path=folder, reason="it has no config.json")
    own = read_folder(folder, dtype)
    if own is not None:
        return _from_own(*own, folder)
    package = hf.transformers()
    checkpoint = Checkpoint.open(folder)
    try:
        config = package.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as err:
        raise UnsupportedArchitecture(
            name=folder, reason=str(err).splitlines()[0], fix="upgrade transformers, or check config.json"
        ) from None
    wanted = dtype if dtype != "auto" else str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    model = meta_model(config, getattr(torch, wanted if wanted in ("float32", "bfloat16") else "bfloat16"))
    generation = _json(folder / "generation_config.json")
    return ModelSource(
        type(model).__name__,
        model,
        checkpoint,
        concrete_buffers(model),
        _context(config),
        _eos(config, generation),
        folder,
        _tokenizer(folder, generation),
    )


def _from_own(model: nn.Module, context: int, folder: Path) -> ModelSource:
    """A definition of ours, whose weights are read already."""
    generation = _json(folder / "generation_config.json")
    held = DictSource({n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())})
    eos = _eos(None, generation | {k: v for k, v in _json(folder / "config.json").items() if k == "eos_token_id"})
    return ModelSource(
        type(model).__name__, model, held, {}, context, eos, folder, _tokenizer(folder, generation)
    )  # fmt: skip


def meta_model(config: Any, dtype: torch.dtype) -> Any:
    """A Transformers causal LM on the meta device: shapes only. Raises UnsupportedArchitecture."""
    package = hf.transformers()
    config = _text_config(config)
    try:
        with torch.device("meta"):
            return package.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except (ValueError, KeyError, AttributeError, ImportError) as err:
        name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        raise UnsupportedArchitecture(
            name=name, reason=str(err).splitlines()[0], fix="only causal language models can be built"
        ) from err


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def concrete_buffers(model: Any) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint holds (rotary frequencies, scales), for a model on the meta device.

    Each is poisoned, then initialised by the model's own code; what stays poisoned is refused.
    """
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        loose = [n for n in module._non_persistent_buffers_set if isinstance(module._buffers.get(n), Tensor)]
        held = {n: module._buffers[n] for n in loose if module._buffers[n].is_meta}
        if not held:
            continue
        with torch.no_grad():
            for name, buffer in held.items():
                blank = torch.empty(buffer.shape, dtype=buffer.dtype)
                module._buffers[name] = (
                    blank.fill_(float("nan")) if blank.is_floating_point() else blank.fill_(-(2**20))
                )
            _owner(model, prefix)._init_weights(module)
        for name, buffer in held.items():
            value = module._buffers[name].detach()
            module._buffers[name] = buffer
            full = f"{prefix}.{name}" if prefix else name
            if (value.isnan() if value.is_floating_point() else value == -(2**20)).any():
                raise UnsupportedConstruct(
                    construct=f"buffer {full} of {type(module).__name__}, in no checkpoint, left by its module",
                    fix="build from a module in memory instead of a folder",
                )
            found[full] = value
    return found


def _owner(model: Any, path: str) -> Any:
    """The innermost model around a module, which is what initialises it."""
    owner = at = model
    for name in path.split(".") if path else ():
        at = getattr(at, name)
        owner = at if hasattr(at, "_init_weights") else owner
    return owner


def _context(config: Any) -> int:
    found = getattr(config, "max_position_embeddings", None) if config is not None else None
    return int(found or DEFAULT_CONTEXT)


def _eos(config: Any, generation: dict[str, Any]) -> tuple[int, ...]:
    found = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text())
    except ValueError as err:
        raise NotAModelFolder(path=path.parent, reason=f"{path.name} is not JSON: {err}") from None
    return data if isinstance(data, dict) else {}


def _tokenizer(folder: Path, generation: dict[str, Any]) -> dict[str, Any]:
    """What the bundle stores of a tokenizer; empty if the folder has no tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    config = _json(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = file.read_text()
    return {"config": config, "chat_template": template, "generation_config": generation}
