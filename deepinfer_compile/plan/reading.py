"""The shape of a model folder or a config.json: a definition of ours where there is one, Transformers' otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer_compile.errors import NotAModelFolder, UnsupportedArchitecture
from deepinfer_compile.plan.shape import Shape


def read_shape(subject: str | Path) -> Shape:
    """The shape of what a user named; no weights are read.

    Raises NotAModelFolder, UnsupportedArchitecture, BadModelConfig (which names the field), MissingExtra.
    """
    path = Path(subject)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise NotAModelFolder(path=subject, reason="there is no config.json")
    try:
        raw = json.loads(path.read_text())
    except (ValueError, RecursionError) as err:
        raise NotAModelFolder(path=path.parent, reason=f"{path.name} is not JSON: {err}") from None
    if not isinstance(raw, dict):
        raise NotAModelFolder(path=path.parent, reason=f"{path.name} is not a JSON object")
    return shape_of(raw, str(path))


def shape_of(raw: dict[str, Any], place: str) -> Shape:
    """The shape of a parsed config.json. place: where it is from, for errors. Raises as `read_shape`."""
    from deepinfer_compile.models.own import traffic

    own = traffic(raw)
    if own is not None:
        return own
    import torch

    from deepinfer_compile.capture import hf
    from deepinfer_compile.capture.source import meta_model
    from deepinfer_compile.plan import library_model

    package = hf.transformers()
    from huggingface_hub.errors import StrictDataclassError

    kind = raw.get("model_type")
    if kind not in package.CONFIG_MAPPING:
        reason = f"Transformers {package.__version__} knows no model_type {kind!r}"
        raise UnsupportedArchitecture(name=place, reason=reason, fix="upgrade transformers, or check config.json")
    try:
        config = package.AutoConfig.for_model(kind, **{k: v for k, v in raw.items() if k != "model_type"})
    except (ValueError, TypeError, KeyError, StrictDataclassError) as err:
        reason = " ".join(str(err).split()) or type(err).__name__
        raise UnsupportedArchitecture(name=place, reason=reason, fix="check config.json") from None
    model = meta_model(config, torch.bfloat16)
    quantization = raw.get("quantization_config") or {}
    return library_model.shape(config.get_text_config(), model, type(model).__name__, quantization)


__all__ = ["read_shape", "shape_of"]
