"""Attention of new tokens over the paged cache.

With few new tokens a request (decode, verification) it is bound by reading the cache once, so a program holds all query
heads of one key head, and the context is split where the requests alone do not fill the target (flash-decoding). How
many pieces pays follows from the number of requests, so it is chosen by token bucket; with one piece there is no
scratch memory and no merge. With many (prefill) a program has one tile of tokens instead of a piece of the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import (
    Call,
    Case,
    KernelSpec,
    Limits,
    Refused,
    alignment,
    next_power_of_2,
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.paged_attention.batch import paged_batch

DTYPES = (torch.float32, torch.bfloat16)
QUERIES = {"decode": 1, "verify": 8}
"""New tokens of a request that share one reading of the cache, by phase."""
TILED_ROWS = 128
"""Rows (heads of a group times tokens) of a program in prefill."""
WIDEST = 256
SMALLEST_TILE = 16
"""Rows and columns: the least that Triton multiplies."""
MOST_PIECES = 32


@dataclass(frozen=True)
class Params:
    """key_width, value_width: elements of a key and of a value; a cache row has the larger. scale, window, softcap: as
    in the operation. sinks: whether there are sink logits, of `dtype`. queries: new tokens of a request that share one
    reading of the cache. tiled: a program has that many tokens of a request, not all of them. align: elements, of which
    every row starts at a multiple."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    page: int
    dtype: torch.dtype
    scale: float
    window: int
    softcap: float
    sinks: bool
    queries: int
    tiled: bool
    align: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads or self.queries < 1 or self.window < 0:
            raise ValueError(f"{self.heads} heads over {self.kv_heads}, {self.queries} queries, window {self.window}")


@dataclass(frozen=True)
class Config:
    """block_m: rows of a tile (queries times heads of a group). block_n: keys read at a time, a divisor of the page.
    pieces: parts of the context, a power of two."""

    block_m: int
    block_n: int
    pieces: int
    num_warps: int
    num_stages: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of cached_attention."""
    given = call.arguments
    q, k, v, kv, sinks = (given[name] for name in ("q", "k", "v", "kv", "sinks"))
    if q.dtype not in DTYPES or any(t is not None and t.dtype != q.dtype for t in (k, v, kv, sinks)):
        return Refused(f"{q.dtype} queries with a {kv.dtype} cache")
    sizes = (*q.shape[1:], *k.shape[1:], *v.shape[1:], *kv.shape[1:])
    if not all(isinstance(n, int) for n in sizes):
        return Refused("its head counts and widths are not fixed")
    if max(k.shape[2], v.shape[2]) > WIDEST:
        return Refused(f"heads wider than {WIDEST} elements")
    if kv.shape[2] % SMALLEST_TILE:
        return Refused(f"pages of {kv.shape[2]} tokens")
    for name in ("q", "k", "v", "kv"):
        if not side_by_side(given[name]):
            return Refused(f"the elements of {name!r} rows do not lie side by side")
    return Params(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        key_width=k.shape[2],
        value_width=v.shape[2],
        page=kv.shape[2],
        dtype=q.dtype,
        scale=float(given["scale"]),
        window=int(given["window"]),
        softcap=float(given["softcap"]),
        sinks=sinks is not None,
        queries=QUERIES.get(call.phase, max(1, TILED_ROWS // (q.shape[1] // k.shape[1]))),
        tiled=call.phase not in QUERIES,
        align=alignment(q, k, v, kv, sinks),
    )


def _rows(params: Params) -> int:
    """Rows that share one key head."""
    return params.heads // params.kv_heads * params.queries


def _shared_bytes(params: Params, config: Config) -> int:
    """An upper estimate of on-chip memory: the query tile, the weights, and keys and values in flight."""
    keys = max(SMALLEST_TILE, next_power_of_2(params.key_width))
    values = max(SMALLEST_TILE, next_power_of_2(params.value_width))
    tile = config.block_m * (keys + config.block_n)
    return (tile + config.num_stages * config.block_n * (keys + values)) * params.dtype.itemsize


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    fits = _shared_bytes(params, config) <= limits.shared_bytes and config.num_warps <= limits.max_warps
    # a warp works on 16 rows or 16 keys; more warps than that repeat each other's work
    useful = config.num_warps <= max(1, config.block_m * config.block_n // (SMALLEST_TILE * SMALLEST_TILE))
    return fits and useful and params.page % config.block_n == 0


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Half a page or more at a time, two stages, and pieces until every core has two programs."""
    largest = min(max(SMALLEST_TILE, next_power_of_2(_rows(params))), TILED_ROWS if params.tiled else 64)
    programs = -(-tokens // params.queries) * params.kv_heads * -(-_rows(params) // largest)
    pieces = 1 if params.tiled else min(MOST_PIECES, next_power_of_2(max(1, 2 * limits.cores // programs)))
    rows = [m for m in (128, 64, 32, 16) if m <= largest]
    for block_m, block_n, stages in product(rows, (64, 32, 16), (2, 1)):
        config = Config(block_m, min(block_n, params.page), pieces, 8 if block_m >= 64 else 4, stages)
        warps = min(config.num_warps, limits.max_warps, max(1, block_m * config.block_n // SMALLEST_TILE**2))
        config = replace(config, num_warps=warps)
        if _is_legal(params, config, limits):
            return config
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    most = min(max(SMALLEST_TILE, next_power_of_2(_rows(params))), 128)
    tiles = [m for m in (16, 32, 64, 128) if m <= most]
    parts = (1,) if params.tiled else (1, 2, 4, 8, 16, 32)
    for m, n, pieces, warps, stages in product(tiles, (16, 32, 64), parts, (1, 2, 4, 8), (1, 2, 3, 4)):
        config = Config(m, n, pieces, warps, stages)
        if _is_legal(params, config, limits):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """Store the new rows, attend, and merge where there are pieces."""
    tokens: Expr = ("size", "q", 0)
    requests: Expr = ("size", "seq_len", 0)
    tiles = params.kv_heads * -(-_rows(params) // config.block_m)
    launches = [
        Launch("write_rows", (tokens,), _write_arguments(params), {"num_warps": 1}),
        Launch(
            "attend",
            (requests, tiles, ("cdiv", tokens, params.queries) if params.tiled else config.pieces),
            _attend_arguments(params, config),
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        ),
    ]
    scratch: tuple[Buffer, ...] = ()
    if config.pieces > 1:
        scratch = (
            Buffer("part", "float32", (tokens, params.heads, config.pieces, params.value_width)),
            Buffer("part_lse", "float32", (tokens, params.heads, config.pieces)),
        )
        made = [pointer("part", torch.float32), pointer("part_lse", torch.float32), pointer("slot", torch.int64, 1)]
        made += [pointer("sinks", params.dtype, params.align)] if params.sinks else []
        made += [pointer("out", params.dtype)]
        launches.append(Launch("merge", (tokens, params.heads), tuple(made), {"num_warps": 1}))
    out = Buffer("out", type_name(params.dtype), (tokens, params.heads, params.value_width))
    return LaunchPlan(_operands(params), (out,), scratch, tuple(launches))


def _operands(params: Params) -> tuple[Operand, ...]:
    name, row = type_name(params.dtype), max(params.key_width, params.value_width)
    found = [
        Operand("q", name, (None, params.heads, params.key_width)),
        Operand("k", name, (None, params.kv_heads, params.key_width)),
        Operand("v", name, (None, params.kv_heads, params.value_width)),
        Operand("kv", name, (None, 2, params.page, params.kv_heads, row), packed=4),
        Operand("query_start", "int32", (None,)),
        Operand("seq_len", "int32", (None,)),
        Operand("block_table", "int32", (None, None)),
        Operand("slot", "int64", (None,)),
    ]
    return (*found, *([Operand("sinks", name, (params.heads,))] if params.sinks else []))


def _stride(name: str, tensor: str, dimension: int, align: int) -> Argument:
    return Argument(name, "i64", ("stride", tensor, dimension), align)


def _write_arguments(params: Params) -> tuple[Argument, ...]:
    align = params.align
    return (
        pointer("k", params.dtype, align),
        pointer("v", params.dtype, align),
        pointer("kv", params.dtype, align),
        pointer("slot", torch.int64, 1),
        pointer("out", params.dtype),
        *(_stride(f"{t}_{part}", t, i, align) for t in "kv" for i, part in enumerate(("token", "head"))),
        _stride("kv_page", "kv", 0, align),
    )


def _attend_arguments(params: Params, config: Config) -> tuple[Argument, ...]:
    align = params.align
    found = [pointer("q", params.dtype, align), pointer("kv", params.dtype, align)]
    found += [pointer(name, torch.int32, 1) for name in ("query_start", "seq_len", "block_table")]
    found.append(pointer("slot", torch.int64, 1))
    if params.sinks:
        found.append(pointer("sinks", params.dtype, align))
    made = ("part", "part_lse") if config.pieces > 1 else ()
    found += [pointer(name, torch.float32) for name in made] or [pointer("out", params.dtype)]
    return (
        *found,
        _stride("q_token", "q", 0, align),
        _stride("q_head", "q", 1, align),
        _stride("table_row", "block_table", 0, 1),
        _stride("kv_page", "kv", 0, align),
    )


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """A key that a request sees is read once and used by all its heads; queries, new rows and output are moved once."""
    tokens, width = sum(new), params.key_width + params.value_width
    pairs = context = 0
    for count, length in zip(new, lengths):
        first = max(0, length - count - params.window + 1) if params.window else 0
        context += length - first if count else 0
        pairs += sum(min(p + 1, params.window or p + 1) for p in range(length - count, length))
    rows = context * params.kv_heads + tokens * (params.heads + 2 * params.kv_heads)
    return Work(2 * params.heads * pairs * width, rows * width * params.dtype.itemsize)


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(8, 2, 64, 64, PAGE_SIZE, torch.bfloat16, 0.125, 0, 0.0, False, 1, False, 16)
    return Case(name, replace(usual, **changes), new, lengths)


F32 = {"dtype": torch.float32}
NARROW = {"key_width": 20, "value_width": 20, "scale": 20**-0.5, "align": 4}
CASES = (
    _case("one", (1,), (1,), heads=1, kv_heads=1, key_width=1, value_width=1, align=1, **F32),
    _case("block", (1, 1, 1), (127, 128, 129), **NARROW, **F32),
    _case("empty", (1, 1, 1, 1), (130, 0, 64, 1), heads=6),
    _case("absent", (1, 0, 1), (65, 0, 63), heads=3, kv_heads=1, key_width=96, value_width=80, **F32),
    _case("window", (1, 1), (300, 20), window=100, heads=12, **NARROW),
    _case("softcap", (1, 1), (70, 191), softcap=5.0, heads=14, **F32),
    _case("sinks", (1, 1), (3, 260), sinks=True, heads=40, kv_heads=1, window=128),
    _case("verify", (3, 1, 8, 11), (3, 64, 70, 130), queries=8, sinks=True, softcap=2.0, **NARROW, **F32),
    _case("wide", (2, 5), (66, 40), queries=8, heads=12, key_width=192, value_width=128, window=9),
    _case("prompts", (70, 1, 0, 33), (100, 1, 65, 33), queries=32, tiled=True, **NARROW, **F32),
    _case("chunk", (40, 9), (200, 9), heads=6, queries=42, tiled=True, window=50, sinks=True, softcap=3.0),
    _case("typical", (1,) * 64, (4096,) * 64, heads=32, kv_heads=8, key_width=128, value_width=128),
    _case("prefill", (4096,) * 4, (4096,) * 4, queries=32, tiled=True, key_width=128, value_width=128),
    _case("largest", (1,) * 256, (8192,) * 256, heads=64, kv_heads=8, key_width=128, value_width=128),
)

SPECS = (
    KernelSpec(
        name="paged_attention",
        op=ops.CACHED_ATTENTION,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=paged_batch,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-7},
    ),
)
