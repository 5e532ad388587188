"""The dialect as ONNX nodes, by the meaning that `ops/` defines.

Attention is spelled out over the whole sequence, latent attention in its expanded form. Experts are computed for every
token and then weighted, most of them by nothing: ONNX has no loop over the experts that tokens chose which runtimes run
well, and a gather of each token's experts would copy their weights once a token. Right before fast.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.graph import value
from deepinfer_compile.onnx_graph import Call, Complex, Emitter
from deepinfer_compile.onnx_ops import gelu, linear, lowers

F32 = torch.float32
LEAST = torch.finfo(F32).min


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type that references compute in."""
    return dtype if dtype == torch.float64 else F32


# -- norms, rotary embedding, activations -----------------------------------------------------------------------------


@lowers("deepinfer.rms_norm")
def _rms_norm(c: Call) -> str:
    return _norm(c, c["x"])


@lowers("deepinfer.add_rms_norm")
def _add_rms_norm(c: Call) -> tuple[str, str]:
    total = c.g.op("Add", c["x"], c["residual"])
    return _norm(c, total), total


def _norm(c: Call, x: str) -> str:
    g, dtype = c.g, c.fake("x").dtype
    inner = wide_type(dtype)
    x = g.cast(x, dtype, inner)
    square = g.op("ReduceMean", g.op("Mul", x, x), g.const([-1]), keepdims=1)
    y = g.op("Div", x, g.op("Sqrt", g.op("Add", square, g.const(c["eps"], inner))))
    if c["weight"] is None:
        return g.cast(y, inner, dtype)
    held = c.fake("weight").dtype
    if c["cast_first"]:
        wanted = torch.promote_types(held, dtype)
        return g.op("Mul", _shifted(c, held, held, wanted), g.cast(g.cast(y, inner, dtype), dtype, wanted))
    return g.cast(g.op("Mul", y, _shifted(c, held, inner, inner)), inner, dtype)


def _shifted(c: Call, held: torch.dtype, during: torch.dtype, wanted: torch.dtype) -> str:
    """weight + offset, added in the type `during`."""
    weight = c.g.cast(c["weight"], held, during)
    if c["offset"] != 0:
        weight = c.g.op("Add", weight, c.g.const(c["offset"], during))
    return c.g.cast(weight, during, wanted)


@lowers("deepinfer.rope")
def _rope(c: Call) -> str:
    g, x, style = c.g, c["x"], c["style"]
    size = int(c.fake("x").shape[-1])
    half = size // 2
    inner = torch.promote_types(c.fake("x").dtype, c.fake("cos").dtype)
    x = g.cast(x, c.fake("x").dtype, inner)
    cos, sin = (g.cast(c[t], c.fake(t).dtype, inner) for t in ("cos", "sin"))
    first, second = (_part(g, x, 0, half), _part(g, x, half, size)) if style == "half" else _pairs(g, x)
    c1, c2, s1, s2 = cos, cos, sin, sin
    if int(c.fake("cos").shape[-1]) == size:
        (c1, c2), (s1, s2) = ((_part(g, t, 0, half), _part(g, t, half, size)) for t in (cos, sin))
    a = g.op("Sub", g.op("Mul", first, c1), g.op("Mul", second, s1))
    b = g.op("Add", g.op("Mul", second, c2), g.op("Mul", first, s2))
    if style == "pair":
        joined = g.op("Concat", *(g.op("Unsqueeze", t, g.const([-1])) for t in (a, b)), axis=-1)
        out = g.reshape(joined, _one_open(c.out))
    else:
        out = g.op("Concat", a, b, axis=-1)
    return g.cast(out, inner, c.dtype)


def _one_open(held: Tensor) -> list[Any]:
    """A shape with -1 in place of its one symbolic size."""
    symbols = [d for d in held.shape if not isinstance(d, int)]
    return [d if isinstance(d, int) else -1 if len(symbols) == 1 else d for d in held.shape]


def _part(g: Emitter, x: str, start: int, stop: int, step: int = 1) -> str:
    """Elements of the last dimension."""
    return g.op("Slice", x, g.const([start]), g.const([stop]), g.const([-1]), g.const([step]))


def _pairs(g: Emitter, x: str) -> tuple[str, str]:
    """The even and the odd elements of the last dimension."""
    return _part(g, x, 0, 1 << 31, 2), _part(g, x, 1, 1 << 31, 2)


@lowers("deepinfer.complex_rope_table")
def _complex_rope_table(c: Call) -> tuple[str, str]:
    table = c["table"]
    if not isinstance(table, Complex):
        raise c.refuse("its complex table is neither a weight nor made by polar(); ONNX has no complex numbers")
    return table[0], table[1]


@lowers("deepinfer.rotary_table")
def _rotary_table(c: Call) -> tuple[str, str]:
    g, inner = c.g, wide_type(c.fake("inv_freq").dtype)
    positions = g.op("Unsqueeze", g.cast(c["position_ids"], c.fake("position_ids").dtype, inner), g.const([-1]))
    angles = g.op("Mul", positions, g.cast(c["inv_freq"], c.fake("inv_freq").dtype, inner))
    if c["form"] == "halves":
        angles = g.op("Concat", angles, angles, axis=-1)
    elif c["form"] == "pairs":
        apart = g.op("Unsqueeze", angles, g.const([-1]))
        angles = g.reshape(g.op("Concat", apart, apart, axis=-1), _one_open(value(c.call)[0]))
    scaling = g.const(c["scaling"], inner)
    cos, sin = (g.cast(g.op("Mul", g.op(kind, angles), scaling), inner, c["dtype"]) for kind in ("Cos", "Sin"))
    return cos, sin


@lowers("deepinfer.gated_act")
def _gated_act(c: Call) -> str:
    return _gate(c, c["gate"], c["up"], c["kind"], c.dtype)


def _gate(c: Call, gate: str, up: str, kind: str, dtype: torch.dtype) -> str:
    g = c.g
    if kind == "relu":
        return g.op("Mul", g.op("Relu", gate), up)
    if kind in ("gelu", "gelu_tanh"):
        return g.op("Mul", gelu(g, gate, dtype, "tanh" if kind == "gelu_tanh" else "none"), up)
    if kind in ("swiglu_oai", "swiglu_clamp"):
        limit = g.const(c["limit"], dtype)
        gate = g.op("Min", gate, limit)
        up = g.op("Min", g.op("Max", up, g.const(-c["limit"], dtype)), limit)
    if kind == "swiglu_oai":
        swish = g.op("Mul", gate, g.op("Sigmoid", g.op("Mul", gate, g.const(c["alpha"], dtype))))
        return g.op("Mul", g.op("Add", up, g.const(1.0, dtype)), swish)
    return g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)


# -- attention --------------------------------------------------------------------------------------------------------


@lowers("deepinfer.attention")
def _attention(c: Call) -> str:
    g, q, k, v = c.g, c.fake("q"), c.fake("k"), c.fake("v")
    inner = wide_type(q.dtype)
    wide = {n: g.cast(c[n], c.fake(n).dtype, inner) for n in ("q", "k", "v")}
    keys, values = (_spread(g, wide[n], t, int(q.shape[-3])) for n, t in (("k", k), ("v", v)))
    s = g.op("MatMul", wide["q"], g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    s = g.op("Mul", s, g.const(c["scale"], inner))
    if c["softcap"] > 0:
        cap = g.const(c["softcap"], inner)
        s = g.op("Mul", g.op("Tanh", g.op("Div", s, cap)), cap)
    visible = _causal(g, q.shape[-2], k.shape[-2], c["window"]) if c["causal"] else None
    if c["mask"] is not None:
        s, visible = _masked(c, s, visible, inner)
    p = _weights(c, s, visible, c["mask"] is not None, inner)
    out = g.cast(g.op("MatMul", p, values), inner, c.dtype)
    return g.op("Transpose", out, perm=[0, 2, 1, 3])


def _spread(g: Emitter, x: str, held: Tensor, heads: int) -> str:
    """[B, Hkv, S, D] -> [B, H, S, D], each head as often as query heads share it."""
    batch, own, _, width = held.shape
    if own == heads:
        return x
    tiled = g.op("Tile", g.op("Unsqueeze", x, g.const([2])), g.const([1, 1, heads // int(own), 1, 1]))
    return g.reshape(tiled, [batch, heads, -1, width])


def _causal(g: Emitter, queries: Any, keys: Any, window: int) -> str:
    """bool[T, S]: which keys a query may see; the same for all layers of a window."""

    def make() -> str:
        zero, one = g.const(0), g.const(1)
        last = g.scalar(g.size(keys))
        first = g.op("Sub", last, g.scalar(g.size(queries)))
        row = g.op("Unsqueeze", g.op("Range", first, last, one), one_axis)
        column = g.op("Range", zero, last, one)
        seen = g.op("LessOrEqual", column, row)
        if window > 0:
            seen = g.op("And", seen, g.op("Greater", column, g.op("Sub", row, g.const(window))))
        return seen

    one_axis = g.const([1])
    found: str = g.once(("causal", str(queries), str(keys), window), make)
    return found


def _masked(c: Call, s: str, visible: str | None, inner: torch.dtype) -> tuple[str, str]:
    """Scores and visibility after an explicit mask: bool, or numbers to add."""
    g, held = c.g, c.fake("mask").dtype
    mask = c["mask"]
    if held != torch.bool:
        s = g.op("Add", s, g.cast(mask, held, inner))
        mask = g.op("Greater", s, g.const(-math.inf, inner))
    return s, mask if visible is None else g.op("And", visible, mask)


def _weights(c: Call, s: str, visible: str | None, may_be_empty: bool, inner: torch.dtype) -> str:
    """Softmax of scores [B, H, T, S] over what is visible; a row that sees nothing gives 0."""
    g = c.g
    if visible is not None:
        # the least number and not -inf, so that a row without a key is no NaN
        s = g.op("Where", visible, s, g.const(torch.finfo(inner).min, inner))
    if c["sinks"] is None:
        p = g.op("Softmax", s, axis=-1)
    else:
        sinks = g.reshape(g.cast(c["sinks"], c.fake("sinks").dtype, inner), [1, -1, 1, 1])
        column = g.op("Expand", sinks, g.op("Concat", g.op("Shape", s, start=0, end=-1), g.const([1]), axis=0))
        p = g.op("Softmax", g.op("Concat", s, column, axis=-1), axis=-1)
        p = _part(g, p, 0, -1)
    if visible is None or not may_be_empty:
        return p
    return g.op("Where", visible, p, g.const(0.0, inner))


@lowers("deepinfer.latent_attention")
def _latent_attention(c: Call) -> str:
    g = c.g
    dtype = c.fake("q_nope").dtype
    inner = wide_type(dtype)
    names = ("q_nope", "q_rope", "c", "k_rope", "w_uk", "w_uv")
    w = {n: g.cast(c[n], c.fake(n).dtype, inner) for n in names}
    latent, rope = (g.op("Unsqueeze", w[n], g.const([1])) for n in ("c", "k_rope"))
    keys = g.op("MatMul", latent, g.op("Transpose", w["w_uk"], perm=[0, 2, 1]))
    s = g.op("MatMul", w["q_nope"], g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    s = g.op("Add", s, g.op("MatMul", w["q_rope"], g.op("Transpose", rope, perm=[0, 1, 3, 2])))
    s = g.op("Mul", s, g.const(c["scale"], inner))
    visible = _causal(g, c.fake("q_nope").shape[-2], c.fake("c").shape[-2], 0)
    p = g.op("Softmax", g.op("Where", visible, s, g.const(torch.finfo(inner).min, inner)), axis=-1)
    out = g.op("MatMul", p, g.op("MatMul", latent, w["w_uv"]))
    return g.op("Transpose", g.cast(out, inner, dtype), perm=[0, 2, 1, 3])


# -- experts ----------------------------------------------------------------------------------------------------------


@lowers("deepinfer.route")
def _route(c: Call) -> tuple[str, str]:
    g, k = c.g, int(c["k"])
    low = g.const(-math.inf, F32)
    logits = g.cast(c["logits"], c.fake("logits").dtype, F32)
    bad = g.op("IsNaN", logits)
    clean = g.op("Where", bad, low, logits)
    scores = _scores(g, clean, c["kind"])
    choice = scores
    if c["bias"] is not None:
        choice = g.op("Add", scores, g.cast(c["bias"], c.fake("bias").dtype, F32))
    choice = g.op("Where", g.op("Or", bad, g.op("IsNaN", choice)), low, choice)
    if c["groups"] > 1:
        choice = _keep_groups(c, choice)
    _, ids = g.ops("TopK", 2, choice, g.const([k]), axis=-1)
    weights = g.op("GatherElements", scores, ids, axis=-1)
    if c["kind"] == "softmax_topk":
        weights = g.op("Softmax", weights, axis=-1)
    if c["normalize"]:
        total = g.op("ReduceSum", weights, g.const([-1]), keepdims=1)
        weights = g.op("Div", weights, g.op("Add", total, g.const(c["eps"], F32)))
    weights = g.op("Mul", weights, g.const(c["scale"], F32))
    # a row without a finite logit is marked, as the operation says
    hopeless = g.op("Equal", g.op("ReduceMax", clean, g.const([-1]), keepdims=1), low)
    return g.cast(ids, torch.int64, torch.int32), g.op("Where", hopeless, g.const(math.nan, F32), weights)


def _scores(g: Emitter, logits: str, kind: str) -> str:
    if kind == "softmax":
        return g.op("Softmax", logits, axis=-1)
    if kind == "sigmoid":
        return g.op("Sigmoid", logits)
    return g.op("Sqrt", g.op("Softplus", logits)) if kind == "sqrt_softplus" else logits


def _keep_groups(c: Call, choice: str) -> str:
    """Scores of experts outside the best groups become -inf."""
    g, groups, experts = c.g, int(c["groups"]), int(c.fake("logits").shape[-1])
    each = experts // groups
    grouped = g.reshape(choice, [-1, groups, each])
    if c["group_rank"] == "top2":
        best, _ = g.ops("TopK", 2, grouped, g.const([min(2, each)]), axis=-1)
        rank = g.op("ReduceSum", best, g.const([-1]), keepdims=0)
    else:
        rank = g.op("ReduceMax", grouped, g.const([-1]), keepdims=0)
    _, chosen = g.ops("TopK", 2, rank, g.const([int(c["kept_groups"])]), axis=-1)
    alive = g.op("Unsqueeze", _one_hot(g, chosen, groups), g.const([-1]))
    kept = g.op("Where", alive, grouped, g.const(-math.inf, F32))
    return g.reshape(kept, [-1, experts])


def _one_hot(g: Emitter, ids: str, count: int) -> str:
    """int64[T, k] -> bool[T, count]: which numbers are among a row's ids; numbers outside are nobody's."""
    return g.cast(g.op("ReduceMax", g.cast(_hits(g, ids, count), torch.bool, torch.int32), g.const([1]), keepdims=0),
                  torch.int32, torch.bool)  # fmt: skip


def _hits(g: Emitter, ids: str, count: int) -> str:
    """int64[T, k] -> bool[T, k, count]."""
    return g.op("Equal", g.op("Unsqueeze", ids, g.const([-1])), g.const(list(range(count))))


@lowers("deepinfer.experts")
def _experts(c: Call) -> str:
    g, w13 = c.g, c.fake("w13")
    count, dtype, swap = int(w13.shape[0]), c.fake("x").dtype, c["transposed"]
    ids = g.cast(c["ids"], c.fake("ids").dtype, torch.int64)
    hits = _hits(g, ids, count)
    given = g.op("Unsqueeze", g.cast(c["weights"], c.fake("weights").dtype, F32), g.const([-1]))
    share = g.op("ReduceSum", g.op("Where", hits, given, g.const(0.0, F32)), g.const([1]), keepdims=0)
    h = _each(c, g.op("Unsqueeze", c["x"], g.const([0])), "w13", "b13", swap)
    width = int(w13.shape[2 if swap else 1])
    gate, up = _pairs(g, h) if c["interleaved"] else (_part(g, h, 0, width // 2), _part(g, h, width // 2, width))
    y = _each(c, _gate(c, gate, up, c["act"], dtype), "w2", "b2", swap)
    # what an expert makes of a token that did not choose it may be anything, infinity too
    chosen, share = (
        g.op("Unsqueeze", g.op("Transpose", t, perm=[1, 0]), g.const([-1])) for t in (_one_hot(g, ids, count), share)
    )
    y = g.op("Where", chosen, g.cast(y, dtype, F32), g.const(0.0, F32))
    total = g.op("ReduceSum", g.op("Mul", y, share), g.const([0]), keepdims=0)
    return g.cast(total, F32, dtype)


def _each(c: Call, x: str, weight: str, bias: str, swap: bool) -> str:
    """x [1 or E, T, K] through the matrix of every expert: [E, T, N]."""
    g, held = c.g, c[weight]
    w = held if swap else g.once(("t", held), lambda: g.op("Transpose", held, perm=[0, 2, 1]))
    y = g.op("MatMul", x, w)
    return y if c[bias] is None else g.op("Add", y, g.op("Unsqueeze", c[bias], g.const([1])))


@lowers("deepinfer.output_projection")
def _output_projection(c: Call) -> str:
    picked = c.g.op("Gather", c["x"], c["rows"], axis=c.fake("x").dim() - 2)
    return linear(c.g, picked, c["weight"], c["bias"])
