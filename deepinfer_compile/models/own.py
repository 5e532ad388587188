"""Architectures that are defined here because Transformers does not know them, by the `model_type` of their config.

What is asked of a definition is little, so that commands need not know which one they have before them: the module on
the meta device, a name, the layers' roles in words, and numbers that its configuration gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from deepinfer_compile.bundle import Checkpoint
from deepinfer_compile.errors import NotAModelFolder
from deepinfer_compile.models.deepseek_v41 import roles
from deepinfer_compile.models.deepseek_v41 import traffic as deepseek_v41_traffic
from deepinfer_compile.models.deepseek_v41.checkpoint import load_published
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import normalised_map, plain_map
from deepinfer_compile.models.deepseek_v41.layers import boundary, kv_bytes_per_token
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.storage import PLAIN, PUBLISHED, Forms
from deepinfer_compile.plan.shape import Shape


@dataclass(frozen=True)
class Own:
    """A configuration of an architecture of ours. model: on the meta device, in bf16, as published.

    boundary: its first decoder layer, None if it has no decoder. layers: a table of roles, column -> words. kv_bytes:
    of global cache that a token adds. backtrack: rows that a rejected draft takes back.
    """

    name: str
    model: nn.Module
    context: int
    boundary: int | None
    layers: tuple[dict[str, str], ...]
    kv_bytes: float
    backtrack: int


def find(subject: str | Path) -> Own | None:
    """The definition for a folder's config.json or such a file; None where it is another architecture, or no file.

    Raises NotAModelFolder for a file that is not JSON, BadModelConfig for values that contradict each other.
    """
    path = Path(subject)
    path = path / "config.json" if path.is_dir() else path
    if (path.name != "config.json" and path.suffix != ".json") or not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
    except ValueError as err:
        raise NotAModelFolder(path=path.parent, reason=f"{path.name} is not JSON: {err}") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    return READERS[kind](raw) if kind in READERS else None


def deepseek_v41(raw: Mapping[str, Any]) -> Own:
    """DeepSeek-V4.1, the text part."""
    config = DeepseekV41Config.read(raw)
    with torch.device("meta"):
        model = DeepseekV41(config, plain_map(config), cache_forms(raw)).eval().to(torch.bfloat16).requires_grad_(False)
    edge = boundary(config)
    return Own(
        name=type(model).__name__,
        model=model,
        context=config.max_position_embeddings,
        boundary=edge if edge < config.num_hidden_layers else None,
        layers=roles.table(config),
        kv_bytes=kv_bytes_per_token(config),
        backtrack=config.dspark_block_size + 1 if config.num_nextn_predict_layers else 0,
    )


def cache_forms(raw: Mapping[str, Any]) -> Forms:
    """How caches hold their rows: in the published formats, on whose grids the release was trained, where the
    configuration says that its weights are quantized; else as they are computed."""
    text: Mapping[str, Any] = raw.get("text_config") or {}
    return PUBLISHED if raw.get("quantization_config") or text.get("quantization_config") else PLAIN


def traffic(raw: Mapping[str, Any]) -> Shape | None:
    """What a plan must know of a parsed config.json; None where it is another architecture. Raises BadModelConfig."""
    if raw.get("model_type") not in READERS:
        return None
    return deepseek_v41_traffic.shape(DeepseekV41Config.read(raw), DeepseekV41.__name__)


def read_folder(folder: Path, dtype: str) -> tuple[nn.Module, int] | None:
    """The model of a folder with its weights, in a dtype ("auto": the config's, else fp32), and its context; None where
    its architecture is another.

    Weights have the published names or those of the module. Memory tables are looked up by the text of tokens, so a
    model with these needs a tokenizer.json. Raises NotAModelFolder, BadModelConfig, and what `load_published` does.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except ValueError as err:
        raise NotAModelFolder(path=folder, reason=f"config.json is not JSON: {err}") from None
    if not isinstance(raw, dict) or raw.get("model_type") not in READERS:
        return None
    config = DeepseekV41Config.read(raw)
    wanted = dtype if dtype != "auto" else str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    model = (
        DeepseekV41(config, _token_map(config, folder), cache_forms(raw))
        .eval()
        .to(getattr(torch, wanted))
        .requires_grad_(False)
    )
    found = Checkpoint.open(folder)
    own = dict(model.named_parameters())
    if own.keys() <= found.names():
        for name, parameter in own.items():
            parameter.copy_(found.tensor(name))
    else:
        load_published(model, folder)
    return model, config.max_position_embeddings


def _token_map(config: DeepseekV41Config, folder: Path) -> Tensor:
    if not config.engram_layer_ids:
        return plain_map(config)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotAModelFolder(path=folder, reason="it has memory tables and no tokenizer.json, whose texts they need")
    tokenizer = Tokenizer.from_file(str(path))
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(config.vocab_size)]
    return normalised_map(config, texts)


READERS: dict[Any, Callable[[Mapping[str, Any]], Own]] = {
    "deepseek_v41": deepseek_v41,
    "deepseek_v41_text": deepseek_v41,
}

__all__ = ["Own", "find", "read_folder", "traffic"]
