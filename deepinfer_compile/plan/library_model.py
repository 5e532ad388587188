"""A model that Transformers defines: weights of its modules on the meta device, attention by the fields of its config.

Weights are named and counted by the module that runs. What a layer attends to is read from the usual fields, and each
field that is missing is named; architectures that read their caches otherwise are refused and not guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer_compile.errors import BadModelConfig, UnsupportedWeightFormat
from deepinfer_compile.ops import ATTENTION, CACHED_ATTENTION, CACHED_LATENT_ATTENTION
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.plan.shape import ROUTED, Shape, Weight, role_of

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
OTHER = ("index_topk", "compress_ratios", "mamba_n_heads", "linear_num_value_heads", "num_kv_shared_layers")
"""Fields of architectures whose attention reads something else than keys before a token, or keeps another state."""
BYTES = {"fp8": 1.0, "bf16": 2.0, "fp32": 4.0, "fp4": 0.5}
MX_SCALE = 32
Stored = Callable[[str, tuple[int, ...]], tuple[str, int]]


def shape(config: Any, model: Any, name: str, quantization: Mapping[str, Any]) -> Shape:
    """A shape of a text config, its model on the meta device and the config's quantisation.

    Raises BadModelConfig naming the field, UnsupportedWeightFormat for a quantisation whose bytes are not known.
    """
    for key in OTHER:
        if found := getattr(config, key, None):
            raise BadModelConfig(key=key, value=found, reason="a plan does not know what its caches hold")
    experts, top = _field(config, EXPERTS, "number of routed experts"), _field(config, TOP, "experts of a token")
    layers = _field(config, ("num_hidden_layers",), "number of layers")
    found = tuple(weights(model, experts, top, formats(config, quantization)))
    if not any(w.role == ROUTED for w in found):
        raise BadModelConfig(key=EXPERTS[0], value=experts, reason=f"{name} has no parameter of that many experts")
    spans = windows(config, layers)
    makes = latent if getattr(config, "kv_lora_rank", None) else grouped
    made = [makes(config, span, key_width(found, layer)) for layer, span in enumerate(spans)]
    return Shape(
        name=name,
        hidden=_field(config, ("hidden_size",), "width"),
        layers=layers,
        experts=experts,
        top=top,
        context=int(getattr(config, "max_position_embeddings", None) or 0),
        weights=found,
        cache_bytes=sum(layer.row_bytes for layer, span in zip(made, spans) if not span),
        request_bytes=sum(layer.row_bytes * span for layer, span in zip(made, spans)),
        step=lambda rows, context: tuple(layer.step(rows, context) for layer in made),
        prompt=lambda start, end: tuple(layer.prompt(start, end) for layer in made),
        spread=int(getattr(config, "topk_group", None) or 0),
    )


def _field(config: Any, names: tuple[str, ...], what: str) -> int:
    """The first of several fields that a config has, as a number from 1. Raises BadModelConfig."""
    for name in names:
        value = getattr(config, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadModelConfig(key=name, value=value, reason=f"the {what} is a whole number from 1")
        return value
    reason = f"a plan needs the {what} ({' or '.join(names)}), and there is none"
    raise BadModelConfig(key=names[0], value=None, reason=reason)


# -- weights ----------------------------------------------------------------------------------------------------------


def weights(model: Any, experts: int, top: int, form: Stored) -> list[Weight]:
    """Every parameter of the model; tied ones once, as the head if the embedding is it too."""
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    found = []
    for name, parameter in model.named_parameters():
        role = role_of(name)
        if role == ROUTED and not (parameter.dim() > 1 and parameter.shape[0] == experts):
            role = ROUTED if re.search(r"\.experts\.\d+\.", name) else "feed-forward"
        if role == "embedding" and tied:
            role = "head"
        at = re.search(r"\.(\d+)\.", name)
        kind, nbytes = form(role, tuple(parameter.shape))
        count = parameter.numel()
        active = count * top // experts if role == ROUTED else 0 if role == "embedding" else count
        layer, rows = int(at[1]) if at else None, parameter.shape[0] if parameter.dim() else 1
        found.append(Weight(name, role, layer, count, nbytes, kind, active, rows=rows))
    return found


def formats(config: Any, quantization: Mapping[str, Any]) -> Stored:
    """How the checkpoint stores a weight of a role and shape: format and bytes. Raises UnsupportedWeightFormat."""
    method = quantization.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise UnsupportedWeightFormat(format=method, reason="a plan knows the bytes of fp8 and mxfp4")
    plain = "fp32" if str(getattr(config, "dtype", None)).endswith("float32") else "bf16"
    block = quantization.get("weight_block_size") or (128, 128)

    def stored(role: str, sizes: tuple[int, ...]) -> tuple[str, int]:
        count = prod(sizes)
        if method == "mxfp4" and role == ROUTED and len(sizes) > 2:
            return "fp4", count // 2 + count // MX_SCALE
        packed = role in (ROUTED, "shared experts", "attention", "feed-forward") and len(sizes) > 1
        if method == "fp8" and packed:
            grid = ceil(sizes[-2] / block[0]) * ceil(sizes[-1] / block[1]) * prod(sizes[:-2])
            return "fp8", count + 4 * grid
        return plain, int(count * BYTES[plain])

    return stored


# -- attention --------------------------------------------------------------------------------------------------------


def windows(config: Any, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 for all tokens. Raises BadModelConfig for a layer of another kind."""
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        use = getattr(config, "use_sliding_window", True)
        return (window if use else 0,) * layers
    spans = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in spans:
            raise BadModelConfig(key="layer_types", value=kind, reason=f"a plan knows {' and '.join(spans)}")
    return tuple(spans[kind] for kind in kinds)


class Attending(NamedTuple):
    """One layer's attention: step(rows, context) and prompt(start, end) as in `Shape`, and bytes of a cached row."""

    step: Callable[[int, int], Work]
    prompt: Callable[[int, int], Work]
    row_bytes: float


def key_width(held: Iterable[Weight], layer: int) -> int | None:
    """The rows of a layer's matrix that makes keys, where it has one of its own."""
    return next((w.rows for w in held if w.layer == layer and w.name.endswith("k_proj.weight")), None)


def latent(config: Any, span: int, _: int | None) -> Attending:
    """Attention over a latent row, absorbed in a decode step and expanded in a prompt.

    The products with the heads' weights are weights' work, which is why what the op does at context 0 is taken off.
    """
    heads, rank = _field(config, ("num_attention_heads",), "number of heads"), config.kv_lora_rank
    nope, rope, value = (
        _field(config, (name,), "width") for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    uk, uv = _meta(heads, nope, rank), _meta(heads, rank, value)
    cache = _meta(1, 64, rank + rope)

    def step(rows: int, context: int) -> Work:
        q_nope, q_rope, new = _meta(rows, heads, nope), _meta(rows, heads, rope), _meta(rows, rank)
        given = (q_nope, q_rope, new, _meta(rows, rope), uk, uv, cache)
        found, none = (
            CACHED_LATENT_ATTENTION.work(*given, None, torch.tensor([n]), None, None, 1.0, "absorbed")
            for n in (_seen(context, span), 0)
        )
        return Work(found.flops - none.flops, found.bytes - none.bytes)

    def prompt(start: int, end: int) -> Work:
        keys = _seen((start + 1 + end) // 2, span)
        q, k, v = (_meta(1, heads, n, w) for n, w in ((end - start, nope + rope), (keys, nope + rope), (keys, value)))
        found = ATTENTION.work(q, k, v)
        return Work(found.flops, 2 * end * (rank + rope))

    return Attending(step, prompt, 2.0 * (rank + rope))


def grouped(config: Any, span: int, keys_width: int | None) -> Attending:
    """The same of keys and values of some heads, as many as the layer's own matrix makes where it has one."""
    heads = _field(config, ("num_attention_heads",), "number of heads")
    width = getattr(config, "head_dim", None) or _field(config, ("hidden_size",), "width") // heads
    shared = keys_width // width if keys_width else getattr(config, "num_key_value_heads", None) or heads
    cache = _meta(1, 2, 64, shared, width)

    def attend(rows: int, keys: int, held: int) -> Work:
        q, k = _meta(rows, heads, width), _meta(rows, shared, width)
        found = CACHED_ATTENTION.work(q, k, k, cache, None, torch.tensor([keys]))
        return Work(found.flops, held * shared * 2 * width * cache.element_size())

    def step(rows: int, context: int) -> Work:
        keys = _seen(context, span)
        return attend(rows, keys, keys)

    def prompt(start: int, end: int) -> Work:
        return attend(end - start, _seen((start + 1 + end) // 2, span), end)

    return Attending(step, prompt, 2.0 * 2 * shared * width)


def _seen(context: int, span: int) -> int:
    return min(context, span) if span else context


def _meta(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


__all__ = ["shape"]
