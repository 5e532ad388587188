"""Transformers models: one node a block for attention and experts, needed rows only, nothing computed at capture.

Transformers lets a caller register attention, mask and expert implementations. Ours put one dialect op into the graph
where the stock ones would spell out masks and data-dependent loops. Everything else is the model's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.capture.rope import Hint
from deepinfer_compile.errors import MissingExtra, UnsupportedConstruct
from deepinfer_compile.ops.activation import KINDS, gate_value

IMPLEMENTATION = "deepinfer"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: q [B, H, T, D], k and v [B, Hkv, S, D] -> [B, T, H, Dv]."""
    known = {"is_causal", "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions"}
    odd = {k for k, v in kwargs.items() if k not in known and isinstance(v, (Tensor, float)) and k != "cu_seq_lens_q"}
    if odd:
        raise UnsupportedConstruct(
            construct=f"{type(module).__name__} passes {sorted(odd)} to its attention",
            fix="register an attention op for it, or report the model",
        )
    causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    out = torch.ops.deepinfer.attention(
        query, key, value, attention_mask, s_aux, scale, int(sliding_window or 0), float(softcap or 0.0), causal
    )
    return out, None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Transformers' mask interface: visibility is a property of our attention op, not a tensor."""


def experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Transformers' experts interface: hidden [T, H], ids and weights [T, k] -> [T, H]."""
    kind, alpha, limit, interleaved = module._deepinfer_gate
    bias = bool(getattr(module, "has_bias", False))
    out: Tensor = torch.ops.deepinfer.experts(
        hidden,
        ids,
        weights,
        module.gate_up_proj,
        module.down_proj,
        module.gate_up_proj_bias if bias else None,
        module.down_proj_bias if bias else None,
        kind,
        alpha,
        limit,
        interleaved,
        bool(getattr(module, "is_transposed", False)),
    )
    return out


def gate_form(module: Any) -> tuple[str, float, float, bool]:
    """(kind, alpha, limit, interleaved) of an experts module, found by comparing its own gate with each known form.

    The module's gate is called on a probe that reaches beyond every clamp; only an exact match counts.
    """
    if not getattr(module, "has_gate", True):
        raise UnsupportedConstruct(
            construct=f"{type(module).__name__} has experts without a gate",
            fix="use experts_implementation='batched_mm'",
        )
    alpha, limit = float(getattr(module, "alpha", 1.702) or 1.702), float(_limit(module))
    probe = torch.linspace(-11.0, 11.0, 22 * 16, dtype=torch.float32).view(16, 22)[
        :, torch.randperm(22, generator=_seed())
    ]
    with torch.no_grad(), torch.device("cpu"):
        wanted = module._apply_gate(probe.clone())
    for interleaved in (False, True):
        gate, up = (probe[..., 0::2], probe[..., 1::2]) if interleaved else probe.chunk(2, -1)
        for kind in KINDS:
            if torch.allclose(gate_value(gate, up, kind, alpha, limit), wanted, rtol=1e-6, atol=1e-6):
                return kind, alpha, limit, interleaved
    raise UnsupportedConstruct(
        construct=f"the gated activation of {type(module).__name__}", fix="add its form to ops/activation.py"
    )


def _limit(module: Any) -> float:
    for name in ("limit", "swiglu_limit"):
        found = getattr(module, name, None)
        if found is not None:
            return float(found)
    return 7.0


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def transformers() -> Any:
    """The transformers package, or an error that names the extra."""
    try:
        import transformers as package
    except ImportError:
        raise MissingExtra(package="transformers", purpose="capturing a Hugging Face model", extra="hf") from None
    return package


def register() -> None:
    """Register the three interfaces once."""
    transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts)


def is_hf(model: nn.Module) -> bool:
    """Whether a module is a Transformers model."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__
    )


SPARSE = {
    "indexer": "selects keys by score (sparse attention)",
    "compressor": "attends to compressed entries beside keys and values",
}
"""Parts of an attention module that make it read other than all keys before a token, which our attention op means."""


def check_attention(model: nn.Module) -> None:
    """Refuse attention that our op does not mean, before tracing. Raises UnsupportedConstruct with the class's line."""
    for path, module in model.named_modules():
        for part, words in SPARSE.items():
            if getattr(module, part, None) is None:
                continue
            cls = type(module)
            line = inspect.getsourcelines(cls)[1]
            raise UnsupportedConstruct(
                construct=f"{path} ({cls.__name__}) {words}",
                fix="use a model with dense or sliding-window attention; this kind needs a cache of its own",
                where=f"{inspect.getsourcefile(cls)}:{line} in {cls.__name__}, its {part}",
            )


@contextmanager
def interfaces(model: Any, attention: str = IMPLEMENTATION, experts: str = IMPLEMENTATION) -> Iterator[None]:
    """Switch a model to our interfaces, or to the named stock implementations, for the time of capture."""
    register()
    check_attention(model)
    config = model.config
    before = getattr(config, "_attn_implementation", None), getattr(config, "_experts_implementation", None)
    has_experts = any(hasattr(m, "_apply_gate") for m in model.modules())
    gated = [m for m in model.modules() if hasattr(m, "_apply_gate")] if experts == IMPLEMENTATION else []
    for module in gated:
        module._deepinfer_gate = gate_form(module)
    model.set_attn_implementation(attention)
    if has_experts:
        model.set_experts_implementation(experts)
    try:
        yield
    finally:
        for module in gated:
            del module._deepinfer_gate
        model.set_attn_implementation(before[0] or "sdpa")
        if has_experts and before[1] is not None:
            model.set_experts_implementation(before[1])


class PackedCausalLM(nn.Module):
    """A Transformers causal LM as a function of packed tokens.

    input_ids, position_ids: i64[1, T]; rows: i64[N]; context_hint: i64[1, T], given only where rotary frequencies
    depend on a request's length -> logits [N, V].
    """

    def __init__(self, model: nn.Module, hint: Hint) -> None:
        super().__init__()
        self.model = model
        self.hint = hint

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, context_hint: Tensor | None = None
    ) -> Tensor:
        self.hint.value = context_hint
        out = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
        return out.logits[0]  # type: ignore[no-any-return]
