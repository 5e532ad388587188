"""Dialect ops written out for Inductor: the form of each that Inductor compiles best, equal to the op's reference.

What Inductor fuses well (norms, rotary, activations, routers) is inlined as its reference. Attention goes back to
scaled_dot_product_attention, latent attention to its absorbed products, and ops that a target has kernels for become
calls of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from deepinfer_compile import ops
from deepinfer_compile.kernel_ops import Rendered
from deepinfer_compile.match import equal_size
from deepinfer_compile.ops.attention import masked_softmax, visibility
from deepinfer_compile.ops.registry import wide

KERNEL_BYTES = 1 << 18
"""Smallest weight whose linear is worth the call of a kernel: below, the call costs more than reading the weight."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
) -> Tensor:
    """`ops.ATTENTION`. q [B, H, T, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> [B, T, H, Dv]."""
    tokens, keys = q.shape[2], k.shape[2]
    grouped = not equal_size(q.shape[1], k.shape[1])
    if causal and window:
        seen = visibility(torch.arange(keys - tokens, keys, device=q.device), keys, window)
        mask = seen if mask is None else seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
        causal = False
    if sinks is None and softcap == 0.0 and not (causal and mask is not None):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    if not grouped or softcap or not equal_size(k.shape[1], v.shape[1]) or causal:
        return ops.ATTENTION.reference(q, k, v, mask, sinks, scale, window, softcap, causal)  # type: ignore[no-any-return]
    return _grouped(q, k, v, mask, sinks, scale)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float) -> Tensor:
    """Heads that share keys become rows of one product, so that no key is repeated in memory."""
    batch, heads, tokens, width = q.shape
    shared = k.shape[1]
    group = heads // shared
    rows = wide(q).reshape(batch, shared, group * tokens, width)
    s = torch.matmul(rows, wide(k).transpose(-1, -2)).reshape(batch, heads, tokens, k.shape[2]) * scale
    visible = torch.ones((), dtype=torch.bool, device=q.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = mask
    elif mask is not None:
        s = s + wide(mask)
    p = masked_softmax(s, visible.expand(s.shape), sinks).reshape(batch, shared, group * tokens, k.shape[2])
    out = torch.matmul(p, wide(v)).reshape(batch, heads, tokens, v.shape[-1])
    return out.to(q.dtype).transpose(1, 2)


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    """`ops.LATENT_ATTENTION`, absorbed. With heads as a batch dimension the products would copy the latent a head."""
    batch, heads, tokens, _ = q_nope.shape
    keys, latent = c.shape[1], c.shape[2]
    if mask is None:
        mask = visibility(torch.arange(keys - tokens, keys, device=c.device), keys, 0)
    absorbed = torch.matmul(q_nope, w_uk).reshape(batch, heads * tokens, latent)
    s = torch.matmul(absorbed, c.transpose(1, 2))
    s = s + torch.matmul(q_rope.reshape(batch, heads * tokens, -1), k_rope.transpose(1, 2))
    s = wide(s).reshape(batch, heads, tokens, keys) * scale
    visible = mask if mask.dtype == torch.bool else torch.ones((), dtype=torch.bool, device=c.device)
    s = s if mask.dtype == torch.bool else s + wide(mask)
    p = masked_softmax(s, visible.expand(s.shape), None).to(c.dtype).reshape(batch, heads * tokens, keys)
    out = torch.matmul(p, c).reshape(batch, heads, tokens, latent)
    return torch.matmul(out, w_uv).transpose(1, 2)


def _fits_kernel(args: tuple[Any, ...]) -> bool:
    """Whether the operands of `ops.EXPERTS` are as kernels read them: whole tensors of one floating type."""
    x, weights = args[0], [t for t in args[3:7] if isinstance(t, Tensor)]
    return x.dtype in (torch.float32, torch.bfloat16) and all(t.dtype == x.dtype and t.is_contiguous() for t in weights)


FORMS: dict[str, Callable[..., Any]] = {"attention": attention, "latent_attention": latent_attention}


class Inliner(Interpreter):
    """Runs a raised block with each dialect op in its form for Inductor. kernels: op name -> kernel overload.
    rendered: kernels made for each call, which come first."""

    def __init__(self, gm: GraphModule, kernels: dict[str, Any], rendered: Rendered | None = None) -> None:
        super().__init__(gm)
        self.kernels, self.rendered = kernels, rendered

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        op = ops.find(target)
        if op is None:
            if target is torch.ops.aten.linear.default and self.rendered is not None and not kwargs:
                made = self.rendered.linear(args[0], args[1], args[2] if len(args) > 2 else None)
                if made is not None:
                    return made
            kernel = self.kernels.get("linear") if target is torch.ops.aten.linear.default else None
            if kernel is not None and not kwargs and args[1].numel() * args[1].element_size() >= KERNEL_BYTES:
                return kernel(args[0], args[1], args[2] if len(args) > 2 else None)
            return super().call_function(target, args, kwargs)
        made = self.rendered.call(op, args, kwargs) if self.rendered is not None else None
        if made is not None:
            return made
        if op is ops.EXPERTS:
            kernel = self.kernels.get("experts", op.overload) if _fits_kernel(args) else op.overload
            return kernel(*args, **kwargs)
        return FORMS.get(op.name, op.reference)(*args, **kwargs)
