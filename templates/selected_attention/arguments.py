"""How the launches of attention over chosen rows are called, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_compile.kernels import pointer, type_name
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

if TYPE_CHECKING:
    from deepinfer_compile.templates.selected_attention import Config, Params

MERGED = 4096
"""Elements of pieces that a program of merge holds: columns of a line, more where there are fewer pieces."""


def plan(params: Params, config: Config) -> LaunchPlan:
    """Store, attend, and merge where there are pieces."""
    tokens: Expr = ("size", "q", 0)
    name, heads, width = type_name(params.dtype), params.heads, params.width
    tiles = -(-heads // config.block_m)
    main = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launches = [
        Launch("store", (tokens,), _store_arguments(params), {"num_warps": 1}),
        Launch("attend", (tokens, tiles, config.pieces), _attend_arguments(params, config), main),
    ]
    scratch: tuple[Buffer, ...] = ()
    if config.pieces > 1:
        part = (tokens, heads, config.pieces, width)
        scratch = (Buffer("part", "float32", part), Buffer("part_lse", "float32", part[:3]))
        made = [pointer("part", torch.float32), pointer("part_lse", torch.float32), *_sinks(params)]
        columns = -(-width // max(64, MERGED // config.pieces))
        merged = (*made, pointer("out", params.dtype))
        launches.append(Launch("merge", (tokens, heads, columns), merged, {"num_warps": 4}))
    out = Buffer("out", name, (tokens, heads, width))
    return LaunchPlan(_operands(params), (out,), scratch, tuple(launches))


def _operands(params: Params) -> tuple[Operand, ...]:
    name, width = type_name(params.dtype), params.width
    near, far = ("uint8" if form else name for form in (params.form, params.rows_form))
    stored, rows = params.stored(params.form), params.stored(params.rows_form)
    found = [
        Operand("q", name, (None, params.heads, width)),
        Operand("latents", near, (None, stored)),
        Operand("cache", near, (None, params.page, stored), packed=2),
        Operand("query_start", "int32", (None,)),
        Operand("seq_len", "int32", (None,)),
        Operand("block_table", "int32", (None, None)),
        Operand("slot", "int64", (None,)),
    ]
    if params.rows_page:
        found += [
            Operand("rows", far, (None, params.rows_page, rows), packed=2),
            Operand("written", "int64", (None,)),
            Operand("rows_table", "int32", (None, None)),
            Operand("chosen", "int32", (None, params.top)),
        ]
    if params.sinks:
        found.append(Operand("sinks", type_name(params.sinks_dtype), (params.heads,)))
    return tuple(found)


def _sinks(params: Params) -> list[Argument]:
    return [pointer("sinks", params.sinks_dtype, 1)] if params.sinks else []


def _stride(name: str, tensor: str, dimension: int, align: int) -> Argument:
    return Argument(name, "i64", ("stride", tensor, dimension), align)


def _held(params: Params, form: tuple[int, ...]) -> tuple[torch.dtype, int]:
    """Type and alignment of latents or rows as they are stored."""
    return (torch.uint8, params.bytes_align) if form else (params.dtype, params.align)


def _store_arguments(params: Params) -> tuple[Argument, ...]:
    held = _held(params, params.form)
    return (
        pointer("latents", *held),
        pointer("cache", *held),
        pointer("slot", torch.int64, 1),
        _stride("latents_token", "latents", 0, held[1]),
        _stride("cache_page", "cache", 0, held[1]),
    )


def _attend_arguments(params: Params, config: Config) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    near, far = _held(params, params.form), _held(params, params.rows_form)
    found = [pointer("q", dtype, align), pointer("cache", *near)]
    found += [pointer(n, torch.int32, 1) for n in ("query_start", "seq_len", "block_table")]
    found.append(pointer("slot", torch.int64, 1))
    steps = [
        Argument("requests", "i32", ("size", "seq_len", 0)),
        _stride("q_token", "q", 0, align),
        _stride("q_head", "q", 1, align),
        _stride("table_row", "block_table", 0, 1),
        _stride("cache_page", "cache", 0, near[1]),
    ]
    if params.rows_page:
        found += [pointer("rows", *far), *(pointer(n, torch.int32, 1) for n in ("rows_table", "chosen"))]
        steps += [_stride("rows_table_row", "rows_table", 0, 1), _stride("rows_step", "rows", 0, far[1])]
        steps.append(_stride("chosen_token", "chosen", 0, 1))
    if config.pieces > 1:
        return (*found, pointer("part", torch.float32), pointer("part_lse", torch.float32), *steps)
    return (*found, *_sinks(params), pointer("out", dtype), *steps)
