"""How the launches of a choice of rows are called, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer_compile.kernels import pointer, type_name
from deepinfer_compile.ops.packed import row_bytes
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

if TYPE_CHECKING:
    from deepinfer_compile.templates.select_rows import Config, Params


def plan(params: Params, config: Config) -> LaunchPlan:
    """Score, narrow and choose: rows, and blocks beside them."""
    tokens: Expr = ("size", "q", 0)
    line = _line(params)
    results = (Buffer("chosen", "int32", (tokens, params.top)), Buffer("made", "int32", (tokens, params.blocks)))
    scratch = [Buffer("scores", "float32", (tokens, line)), *_kept("chosen", params.top, line, config)]
    if params.blocks:
        tops: Expr = ("cdiv", line, params.block)
        scratch += [Buffer("peaks", "float32", (tokens, tops)), *_kept("made", params.blocks, tops, config)]
    main = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    lists = 2 if params.blocks else 1
    narrow, choose = {"num_warps": config.narrow_warps}, {"num_warps": config.choose_warps}
    parts: Expr = ("cdiv", line, config.block_s)
    return LaunchPlan(
        _operands(params),
        results,
        tuple(scratch),
        (
            Launch("score", (("cdiv", tokens, config.tokens), config.pieces), _score_arguments(params, config), main),
            Launch("narrow", (tokens, parts, lists), _choose_arguments(params, "scores", "peaks"), narrow),
            Launch("choose", (tokens, lists), _choose_arguments(params), choose),
        ),
    )


def _kept(name: str, most: int, line: Expr, config: Config) -> list[Buffer]:
    """What every part of a line may keep."""
    shape = (("size", "q", 0), ("cdiv", line, config.block_s), min(most, config.block_s))
    return [Buffer(f"{name}_keys", "int32", shape), Buffer(f"{name}_numbers", "int32", shape)]


def _row(params: Params) -> int:
    """Elements of a key as it is stored."""
    return row_bytes(params.width, params.form) if params.form else params.width


def _line(params: Params) -> Expr:
    """Scores of a token: of all rows that its pages have room for, or of its candidate blocks."""
    return params.limit * params.block if params.limit else ("mul", ("size", "block_table", 1), params.page)


def _operands(params: Params) -> tuple[Operand, ...]:
    name = type_name(params.dtype)
    found = [
        Operand("q", name, (None, params.heads, params.width)),
        Operand("weights", type_name(params.weights_dtype), (None, params.heads)),
        Operand("keys", "uint8" if params.form else name, (None, params.page, _row(params)), packed=2),
        Operand("written", "int64", (None,)),
        Operand("query_start", "int32", (None,)),
        Operand("seq_len", "int32", (None,)),
        Operand("block_table", "int32", (None, None)),
    ]
    return (*found, *([Operand("candidates", "int32", (None, params.limit))] if params.limit else []))


def _stride(name: str, tensor: str, dimension: int, align: int) -> Argument:
    return Argument(name, "i64", ("stride", tensor, dimension), align)


def _batch(params: Params, *names: str) -> list[Argument]:
    limit = [pointer("candidates", torch.int32, 1)] if params.limit else []
    return [pointer("written", torch.int64, 1), *(pointer(n, torch.int32, 1) for n in names), *limit]


def _score_arguments(params: Params, config: Config) -> tuple[Argument, ...]:
    dtype, align = params.dtype, params.align
    return (
        pointer("q", dtype, align),
        pointer("weights", params.weights_dtype, 1),
        pointer("keys", torch.uint8, params.bytes_align) if params.form else pointer("keys", dtype, align),
        *_batch(params, "query_start", "seq_len", "block_table"),
        pointer("scores", torch.float32),
        Argument("requests", "i32", ("size", "seq_len", 0)),
        *([Argument("tokens", "i32", ("size", "q", 0))] if config.tokens > 1 else []),
        Argument("line", "i64", _line(params)),
        _stride("q_token", "q", 0, align),
        _stride("q_head", "q", 1, align),
        _stride("weights_token", "weights", 0, 1),
        _stride("keys_page", "keys", 0, params.bytes_align if params.form else align),
        _stride("table_row", "block_table", 0, 1),
        *([_stride("candidates_token", "candidates", 0, 1)] if params.limit else []),
    )


def _choose_arguments(params: Params, *given: str) -> tuple[Argument, ...]:
    lists = ("chosen", "made") if params.blocks else ("chosen",)
    return (
        *_batch(params, "query_start", "seq_len"),
        *(pointer(name, torch.float32) for name in given[: len(lists)]),
        *(pointer(f"{name}{kept}", torch.int32) for name in lists for kept in ("", "_keys", "_numbers")),
        Argument("requests", "i32", ("size", "seq_len", 0)),
        Argument("line", "i64", _line(params)),
        *([_stride("candidates_token", "candidates", 0, 1)] if params.limit else []),
    )
