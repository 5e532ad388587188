"""How the launches of latent attention are called, as data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deepinfer_compile.kernels import pointer, type_name
from deepinfer_compile.runtime.launch import EARLY, Argument, Buffer, Expr, Launch, LaunchPlan, Operand

if TYPE_CHECKING:
    from deepinfer_compile.templates.latent_attention import Config, Params


LEAST = 16
"""Tokens of a tile that goes to the matrix units, as that of absorb always does."""
MERGED = 4096
"""Elements of pieces that a program of merge holds: columns of a line, more where there are fewer pieces."""


def _stride(name: str, tensor: str, dimension: int, align: int, times: int = 1) -> Argument:
    step: Expr = ("stride", tensor, dimension)
    return Argument(name, "i64", ("mul", times, step) if times > 1 else step, align)


def _steps(params: Params, tensor: str) -> tuple[Argument, ...]:
    """How far apart requests, tokens and heads of a query part are."""
    if params.page:
        request = _stride("q_request", tensor, 0, params.align, params.queries)
        return (request, _stride("q_token", tensor, 0, params.align), _stride("q_head", tensor, 1, params.align))
    return tuple(
        _stride(name, tensor, i, params.align) for name, i in (("q_request", 0), ("q_token", 2), ("q_head", 1))
    )


def _mask_steps() -> tuple[Argument, ...]:
    return tuple(_stride(name, "mask", i, 1) for name, i in (("mask_request", 0), ("mask_token", 2), ("mask_key", 3)))


def _tokens(params: Params) -> Expr:
    return ("size", "q_nope", 0) if params.page else ("mul", params.queries, ("size", "q_nope", 0))


def _requests(params: Params) -> Expr:
    return ("size", "seq_len" if params.page else "q_nope", 0)


def plan(params: Params, config: Config) -> LaunchPlan:
    """Absorb, attend, merge where there are pieces, project; for a single token the last two are one."""
    name, tokens, requests = type_name(params.dtype), _tokens(params), _requests(params)
    tiles: Expr = ("cdiv", tokens, max(LEAST, config.block_t))
    columns = params.heads * -(-params.latent // config.absorb_n)
    grid: Expr = ("mul", tiles, columns)
    side, early = {"num_warps": config.side_warps}, {EARLY: 1} if config.pdl else {}
    parts: Expr = ("cdiv", tokens, params.queries) if params.tiled else config.pieces
    scratch = [Buffer("queries", name, (tokens, params.heads, params.latent))]
    if params.mask == "bool":
        grid = ("add", requests, grid)
        scratch.append(Buffer("span", "int32", (requests, 4)))
    finished = config.pieces > 1 and config.block_t == 1
    if not finished:
        scratch.append(Buffer("mid", name, (tokens, params.heads, params.latent)))
    part = (tokens, params.heads, config.pieces, params.latent)
    ends: list[Launch] = []
    if config.pieces > 1:
        scratch += [Buffer("part", "float32", part), Buffer("part_lse", "float32", part[:3])]
        slot = [pointer("slot", torch.int64, 1)] if params.page else []
        joined = (*_parts(config, params), *slot, pointer("mid", params.dtype))
        merged = -(-params.latent // max(64, MERGED // config.pieces))
        ends = [Launch("merge", (tokens, params.heads, merged), joined, {"num_warps": 1, **early})]
    rows = -(-params.heads * params.queries // config.block_m)
    main = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    out = Buffer("out", name, (tokens, params.heads, params.value))
    project_grid = (("cdiv", tokens, config.block_t), params.heads, -(-params.value // config.project_n))
    if finished:
        ends = [Launch("finish", project_grid, _finish_arguments(params, config), side)]
    else:
        ends.append(Launch("project", project_grid, _project_arguments(params), side))
    return LaunchPlan(
        _operands(params),
        (out,),
        tuple(scratch),
        (
            Launch("absorb", (grid,), _absorb_arguments(params), {**side, **early}),
            Launch("attend", (rows, requests, parts), _attend_arguments(params, config), main),
            *ends,
        ),
    )


def _operands(params: Params) -> tuple[Operand, ...]:
    name = type_name(params.dtype)
    h, page = params.heads, bool(params.page)
    before: tuple[int | None, ...] = (None, h) if page else (None, h, params.queries)
    keys: tuple[int | None, ...] = (None,) if page else (None, None)
    found = [
        Operand("q_nope", name, (*before, params.nope)),
        Operand("q_rope", name, (*before, params.rope)),
        Operand("c", name, (*keys, params.latent)),
        Operand("k_rope", name, (*keys, params.rope)),
        Operand("w_uk", name, (h, params.nope, params.latent)),
        Operand("w_uv", name, (h, params.latent, params.value), packed=0 if params.value_rows else 1),
    ]
    if page:
        found.append(Operand("latent", name, (None, params.page, params.latent + params.rope), packed=2))
        found += [Operand(n, "int32", (None,)) for n in ("query_start", "seq_len")]
        found += [Operand("block_table", "int32", (None, None)), Operand("slot", "int64", (None,))]
    if params.mask == "bool":
        found.append(Operand("mask", "bool", (None, 1, params.queries, None), packed=0))
    elif params.mask == "additive":
        found.append(Operand("mask", name, (None, 1, params.queries, None), packed=0))
    return tuple(found)


def _absorb_arguments(params: Params) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    found = [pointer("q_nope", dtype, align), pointer("w_uk", dtype, align), pointer("queries", dtype)]
    if params.page:
        found += [pointer("c", dtype, align), pointer("k_rope", dtype, align)]
        found.append(replace(pointer("cache", dtype, align), value="latent"))
        found.append(pointer("slot", torch.int64, 1))
        found += [_stride("c_token", "c", 0, align), _stride("k_rope_token", "k_rope", 0, align)]
        found.append(_stride("cache_page", "latent", 0, align))
    if params.mask == "bool":
        found += [pointer("mask", torch.bool, 1), pointer("span", torch.int32, 1)]
        found += [Argument("requests", "i32", _requests(params)), Argument("keys", "i32", ("size", "c", 1))]
        found += _mask_steps()
    steps = [_stride("uk_head", "w_uk", 0, align), _stride("uk_row", "w_uk", 1, align)]
    return (*found, Argument("tokens", "i32", _tokens(params)), *_steps(params, "q_nope"), *steps)


def _attend_arguments(params: Params, config: Config) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    found = [pointer("queries", dtype), pointer("q_rope", dtype, align)]
    if params.page:
        found.append(replace(pointer("cache", dtype, align), value="latent"))
        found += [pointer(name, torch.int32, 1) for name in ("query_start", "seq_len", "block_table")]
        found += [_stride("table_row", "block_table", 0, 1), _stride("cache_page", "latent", 0, align)]
    else:
        found += [pointer("c", dtype, align), pointer("k_rope", dtype, align)]
        found.append(Argument("keys", "i32", ("size", "c", 1)))
        found += [_stride("c_request", "c", 0, align), _stride("c_key", "c", 1, align)]
        found += [_stride("k_rope_request", "k_rope", 0, align), _stride("k_rope_key", "k_rope", 1, align)]
    if params.mask != "causal":
        found += [pointer("mask", torch.bool if params.mask == "bool" else dtype, 1), *_mask_steps()]
    if params.mask == "bool":
        found.append(pointer("span", torch.int32, 1))
    found += _parts(config, params)
    return (*found, *_steps(params, "q_rope"))


def _project_arguments(params: Params) -> tuple[Argument, ...]:
    found = [pointer("mid", params.dtype)]
    found += [pointer("slot", torch.int64, 1)] if params.page else []
    found += [pointer("w_uv", params.dtype, params.align), pointer("out", params.dtype)]
    found.append(Argument("tokens", "i32", _tokens(params)))
    row = 2 if params.value_rows else 1
    steps = (_stride("uv_head", "w_uv", 0, params.align), _stride("uv_row", "w_uv", row, params.align))
    return (*found, *steps)


def _finish_arguments(params: Params, config: Config) -> tuple[Argument, ...]:
    pieces, rest = _parts(config, params), _project_arguments(params)[1:]
    return (*pieces, *(argument for argument in rest if argument.name != "tokens"))


def _parts(config: Config, params: Params) -> list[Argument]:
    """What attend writes: the result, or pieces of it."""
    if config.pieces == 1:
        return [pointer("mid", params.dtype)]
    return [pointer("part", torch.float32), pointer("part_lse", torch.float32)]
