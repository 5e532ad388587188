"""How the launches of latent attention of prompts are called, as data."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepinfer_compile.kernels import next_power_of_2, pointer, type_name
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.latent_prefill.params import Config, Params

SMALLEST_TILE = 16
SIDE_STAGES = 3
"""Of the products with weights around look_back."""
TOKENS: Expr = ("size", "q_nope", 0)
REQUESTS: Expr = ("size", "seq_len", 0)


def tile(number: int) -> int:
    """Elements that a row of so many takes in a tile."""
    return max(SMALLEST_TILE, next_power_of_2(number))


def _stride(name: str, tensor: str, dimension: int, align: int) -> Argument:
    return Argument(name, "i64", ("stride", tensor, dimension), align)


def _queries(align: int) -> tuple[Argument, ...]:
    """How far apart tokens and heads of the two query parts are."""
    return (
        _stride("q_token", "q_nope", 0, align),
        _stride("q_head", "q_nope", 1, align),
        _stride("q_rope_token", "q_rope", 0, align),
        _stride("q_rope_head", "q_rope", 1, align),
    )


def _weights(params: Params) -> tuple[Argument, ...]:
    """How far apart heads and rows of the up-projections are."""
    align, row = params.align, 2 if params.value_rows else 1
    return (
        _stride("uk_head", "w_uk", 0, align),
        _stride("uk_row", "w_uk", 1, align),
        _stride("uv_head", "w_uv", 0, align),
        _stride("uv_row", "w_uv", row, align),
    )


def _tiles(size: int, rows: int = 1) -> Expr:
    """At least the tiles of all requests, of so many rows a token: each may have one that is not full."""
    return ("add", ("cdiv", ("mul", rows, TOKENS), size), REQUESTS)


def plan(params: Params, config: Config) -> LaunchPlan:
    """Write, expand, attend; absorb, look back, merge. attend reads whole blocks of keys, so rows follow the last."""
    name, heads = type_name(params.dtype), params.heads
    expand = {"num_warps": config.expand_warps, "num_stages": config.expand_stages}
    attend = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    side = {"num_warps": min(config.past_warps, 4 if tile(params.value) <= 128 else 8), "num_stages": SIDE_STAGES}
    past = (_tiles(config.past_m), -(-heads // config.past_heads))
    back = (_tiles(config.past_m * config.past_heads, heads),)
    absorb, look_back, merge = _past(params)
    return LaunchPlan(
        _operands(params),
        (Buffer("out", name, (TOKENS, heads, params.value)),),
        (
            Buffer("turned", name, (("add", TOKENS, config.block_n), tile(params.rope))),
            Buffer("keys", name, (("add", ("mul", heads, TOKENS), config.block_n), tile(params.nope))),
            Buffer("values", name, (heads, TOKENS, tile(params.value))),
            Buffer("lse", "float32", (TOKENS, heads)),
            Buffer("queries", name, (TOKENS, heads, params.latent)),
        ),
        (
            Launch("write", (TOKENS,), _write_arguments(params), {"num_warps": 1}),
            Launch("expand", (("cdiv", TOKENS, config.expand_m), heads), _expand_arguments(params), expand),
            Launch("attend", (_tiles(config.block_m), heads), _attend_arguments(params), attend),
            Launch("absorb", past, absorb, side),
            Launch("look_back", back, look_back, {"num_warps": config.past_warps, "num_stages": config.past_stages}),
            Launch("merge", past, merge, side),
        ),
    )


def _operands(params: Params) -> tuple[Operand, ...]:
    name, heads = type_name(params.dtype), params.heads
    return (
        Operand("q_nope", name, (None, heads, params.nope)),
        Operand("q_rope", name, (None, heads, params.rope)),
        Operand("c", name, (None, params.latent)),
        Operand("k_rope", name, (None, params.rope)),
        Operand("w_uk", name, (heads, params.nope, params.latent)),
        Operand("w_uv", name, (heads, params.latent, params.value), packed=0 if params.value_rows else 1),
        Operand("latent", name, (None, params.page, params.latent + params.rope), packed=2),
        *(Operand(n, "int32", (None,)) for n in ("query_start", "seq_len")),
        Operand("block_table", "int32", (None, None)),
        Operand("slot", "int64", (None,)),
    )


def _cache(params: Params) -> Argument:
    return replace(pointer("cache", params.dtype, params.align), value="latent")


def _write_arguments(params: Params) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    return (
        *(pointer(n, dtype, align) for n in ("c", "k_rope")),
        _cache(params),
        pointer("slot", torch.int64, 1),
        *(pointer(n, dtype) for n in ("turned", "out")),
        _stride("c_token", "c", 0, align),
        _stride("k_rope_token", "k_rope", 0, align),
        _stride("cache_page", "latent", 0, align),
    )


def _expand_arguments(params: Params) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    return (
        *(pointer(n, dtype, align) for n in ("c", "w_uk", "w_uv")),
        pointer("slot", torch.int64, 1),
        *(pointer(n, dtype) for n in ("keys", "values")),
        Argument("tokens", "i32", TOKENS),
        _stride("c_token", "c", 0, align),
        *_weights(params),
    )


def _attend_arguments(params: Params) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    return (
        *(pointer(n, dtype, align) for n in ("q_nope", "q_rope")),
        *(pointer(n, dtype) for n in ("keys", "values", "turned")),
        *(pointer(n, torch.int32, 1) for n in ("query_start", "seq_len")),
        pointer("slot", torch.int64, 1),
        pointer("out", dtype),
        pointer("lse", torch.float32),
        Argument("tokens", "i32", TOKENS),
        Argument("requests", "i32", REQUESTS),
        *_queries(align),
    )


def _past(params: Params) -> tuple[tuple[Argument, ...], tuple[Argument, ...], tuple[Argument, ...]]:
    """Arguments of absorb, of look_back and of merge."""
    dtype, align = params.dtype, params.align
    where = tuple(pointer(n, torch.int32, 1) for n in ("query_start", "seq_len"))
    queries, lse = pointer("queries", dtype), pointer("lse", torch.float32)
    requests = Argument("requests", "i32", REQUESTS)
    nope, rope, uk, uv = _queries(align)[:2], _queries(align)[2:], _weights(params)[:2], _weights(params)[2:]
    absorb = (*(pointer(n, dtype, align) for n in ("q_nope", "w_uk")), *where, queries, requests, *nope, *uk)
    slot, out = pointer("slot", torch.int64, 1), pointer("out", dtype)
    merge = (queries, pointer("w_uv", dtype, align), *where, slot, lse, out)
    pages = (_stride("table_row", "block_table", 0, 1), _stride("cache_page", "latent", 0, align))
    read = (pointer("q_rope", dtype, align), _cache(params), *where, pointer("block_table", torch.int32, 1), lse)
    return absorb, (queries, *read, requests, *rope, *pages), (*merge, requests, *uv)
