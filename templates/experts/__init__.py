"""The chosen experts' work: pairs of token and choice grouped by expert on the device, then two matrix products.

Few tokens are bound by reading the weights of the experts that are hit, each once; many by the matrix units, where
blocks of one expert share its weights in the cache. Which it is follows from the rows that an expert gets, so tiles are
chosen by the number of tokens. A token's own choices are distinct experts, so that with one or two tokens every pair is
a block of its own and nothing is sorted (`direct`). Nothing is read back by the host: the number of blocks is bounded
by the plan, and programs past the last block end at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import (
    Call,
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
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.experts.batch import CASES, routed_batch
from deepinfer_compile.templates.experts.params import Params

DTYPES = (torch.float32, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)
MOST = 1 << 31
SMALLEST_TILE = 16
ACCUMULATORS = 128
"""fp32 sums that a thread keeps in registers."""
COLUMNS = 1024
"""Columns of a program of `combine`."""
LADDER = 17
"""Powers of two of tokens that have a default of their own."""


@dataclass(frozen=True)
class Config:
    """block_m: pairs of a block, all of one expert. up_n: columns of the activation that a program makes, of as many
    gates and ups; down_n: columns of the result. up_k, down_k: terms of a product read at a time. group: neighbouring
    blocks that share a weight tile; with 1, weights pass through the cache without staying. tail: a block with at most
    that many pairs is done as a block of that size, 0 for never. direct: a block is one pair, nothing is sorted.
    pdl: the next launch may start before the last one has ended."""

    block_m: int
    up_n: int
    up_k: int
    up_warps: int
    up_stages: int
    down_n: int
    down_k: int
    down_warps: int
    down_stages: int
    group: int
    tail: int
    direct: bool
    pdl: bool = False


class Tile(NamedTuple):
    """One half of a Config: columns, terms at a time, warps, stages."""

    n: int
    k: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """A default for experts with up to `rows` pairs each."""

    rows: float
    block_m: int
    up: Tile
    down: Tile
    group: int = 1
    tail: int = 0


DIRECT = Plan(0, 16, Tile(64, 128, 4, 3), Tile(64, 256, 4, 3))
SORTED = (
    Plan(1, 16, Tile(64, 256, 4, 3), Tile(64, 256, 4, 3)),
    Plan(3, 16, Tile(128, 128, 4, 3), Tile(128, 256, 4, 3)),
    Plan(8, 16, Tile(32, 256, 4, 4), Tile(128, 128, 4, 4)),
    Plan(24, 32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3)),
    Plan(64, 64, Tile(128, 64, 8, 4), Tile(128, 64, 4, 4), 8, 16),
    Plan(float("inf"), 128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4), 8, 16),
)
"""Measured with 256 experts of 7168 x 2048, 8 a token, in bf16."""
EXACT = Tile(32, 32, 4, 2)
"""For fp32, which the matrix units cannot do: a larger tile is unrolled into more code than registers hold."""


def bind(call: Call) -> Params | Refused:
    """Params of a call of experts."""
    given = call.arguments
    x, ids, weights, w13, w2, b13, b2 = (given[n] for n in ("x", "ids", "weights", "w13", "w2", "b13", "b2"))
    if x.dtype not in DTYPES or any(t is not None and t.dtype != x.dtype for t in (w13, w2, b13, b2)):
        return Refused(f"rows of {x.dtype} with weights of {w13.dtype}")
    if ids.dtype not in ID_DTYPES or weights.dtype not in DTYPES:
        return Refused(f"ids of {ids.dtype} with routing weights of {weights.dtype}")
    if x.dim() != 2 or ids.dim() != 2:
        return Refused("rows under more than one size; collapse them to one")
    if not all(isinstance(n, int) for n in (*w13.shape, *w2.shape, x.shape[1], ids.shape[1])):
        return Refused("its sizes other than the number of tokens are not fixed")
    if w13[0].numel() >= MOST or ids.shape[1] > w13.shape[0]:
        return Refused(f"experts of {w13[0].numel()} elements, {ids.shape[1]} of {w13.shape[0]} a token")
    for name in ("x", "ids", "weights"):
        if not side_by_side(given[name]):
            return Refused(f"the elements of {name!r} rows do not lie side by side")
    if any(t is not None and not t.is_contiguous() for t in (w13, w2, b13, b2)):
        return Refused("weights of the experts with gaps or in another order")
    return Params(
        hidden=x.shape[1],
        width=w2.shape[1 if given["transposed"] else 2],
        experts=w13.shape[0],
        top_k=ids.shape[1],
        dtype=x.dtype,
        ids_dtype=ids.dtype,
        weights_dtype=weights.dtype,
        act=given["act"],
        alpha=float(given["alpha"]),
        limit=float(given["limit"]),
        interleaved=bool(given["interleaved"]),
        transposed=bool(given["transposed"]),
        up_bias=b13 is not None,
        down_bias=b2 is not None,
        align=alignment(x, w13, w2, b13, b2),
    )


def _fits(params: Params, limits: Limits, block_m: int, tile: Tile, lines: int) -> bool:
    """Whether sums fit in registers and operands in flight on chip. lines: of weights for each column."""
    held = block_m * tile.n * lines
    # small blocks are multiplied out of registers, so the tile in work needs no room of its own
    buffers = tile.stages if block_m >= 64 else max(1, tile.stages - 1)
    flying = buffers * (block_m + tile.n * lines) * tile.k * params.dtype.itemsize
    # the sums pass through shared memory once, on their way out
    on_chip = max(flying, held * torch.float32.itemsize) <= limits.shared_bytes
    return on_chip and held <= ACCUMULATORS * 32 * tile.warps and tile.warps <= limits.max_warps


def _fit(params: Params, limits: Limits, block_m: int, tile: Tile, up: bool) -> Tile:
    """The nearest smaller tile that is no wider than the matrix and fits. Raises ValueError."""
    columns, terms = (params.width, params.hidden) if up else (params.hidden, params.width)
    n = max(SMALLEST_TILE, min(tile.n, next_power_of_2(columns)))
    k = max(SMALLEST_TILE, min(tile.k, next_power_of_2(terms)))
    while k > 64 and terms % k:
        k //= 2
    tile = Tile(n, k, min(tile.warps, limits.max_warps), tile.stages)
    while not _fits(params, limits, block_m, tile, 1 + up):
        if tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.k > 64:
            tile = tile._replace(k=tile.k // 2)
        elif tile.n > SMALLEST_TILE:
            tile = tile._replace(n=tile.n // 2)
        elif tile.k > SMALLEST_TILE:
            tile = tile._replace(k=tile.k // 2)
        else:
            raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")
    return tile


def _config(block_m: int, up: Tile, down: Tile, group: int, tail: int, direct: bool, pdl: bool) -> Config:
    return Config(block_m, *up, *down, group, tail, direct, pdl)


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """By the pairs that an expert gets, on the safe side; narrower where the target would not be filled."""
    tokens = min(next_power_of_2(max(1, tokens)), 1 << LADDER)
    pairs = tokens * params.top_k
    direct = tokens == 1 or 16 * pairs <= params.experts
    found = DIRECT if direct else next(p for p in SORTED if pairs <= p.rows * params.experts)
    if params.dtype == torch.float32:
        found = found._replace(block_m=min(found.block_m, 32), up=EXACT, down=EXACT, tail=0)
    blocks = min(params.experts, pairs)
    tiles = []
    for tile, columns, up in ((found.up, params.width, True), (found.down, params.hidden, False)):
        tile = _fit(params, limits, found.block_m, tile, up)
        while tile.n > 32 and blocks * -(-columns // tile.n) < limits.cores:
            tile = tile._replace(n=tile.n // 2)
        tiles.append(tile)
    return _config(found.block_m, tiles[0], tiles[1], found.group, found.tail, direct, limits.pdl)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """The defaults, then for every size of a block each half varied beside the other's default."""
    found = dict.fromkeys(default(params, limits, 1 << i) for i in range(LADDER + 1))
    bases = {(c.block_m, c.direct): c for c in list(found)[::-1]}
    for base in bases.values():
        for tile in _tiles(params, limits, base.block_m, up=True):
            found[replace(base, up_n=tile.n, up_k=tile.k, up_warps=tile.warps, up_stages=tile.stages)] = None
        for tile in _tiles(params, limits, base.block_m, up=False):
            found[replace(base, down_n=tile.n, down_k=tile.k, down_warps=tile.warps, down_stages=tile.stages)] = None
        tails = (0, 16) if base.block_m > 32 else (0,)
        for group, tail in product((1, 4, 8, 16), tails):
            if not base.direct:
                found[replace(base, group=group, tail=tail)] = None
    yield from found


def _tiles(params: Params, limits: Limits, block_m: int, *, up: bool) -> Iterator[Tile]:
    """Legal tiles of one half that keep enough in flight to be worth a measurement."""
    exact = params.dtype == torch.float32
    sizes = ((16, 32, 64), (16, 32), (4, 8), (2, 3)) if exact else ((32, 64, 128, 256), (64, 128, 256), (4, 8), (3, 4))
    for n, k, warps, stages in product(*sizes):
        tile = Tile(n, k, warps, stages)
        if _fit(params, limits, block_m, tile, up) != tile or (warps > 4 and block_m * n < 4096):
            continue
        if exact or stages * (block_m + n * (1 + up)) * k * params.dtype.itemsize >= limits.shared_bytes // 4:
            yield tile


def plan(params: Params, config: Config) -> LaunchPlan:
    """Sort, up, down, combine; or without sorting."""
    tokens: Expr = ("size", "x", 0)
    pairs: Expr = ("mul", tokens, params.top_k)
    blocks: Expr = pairs
    scratch: list[Buffer] = []
    launches: list[Launch] = []
    if not config.direct:
        blocks = ("min", pairs, ("add", ("cdiv", pairs, config.block_m), params.experts))
        scratch = [
            Buffer("counts", "int32", (params.experts,)),
            Buffer("order", "int32", (blocks, config.block_m)),
            Buffer("block_expert", "int32", (blocks,)),
            Buffer("blocks", "int32", (1,)),
        ]
        launches = _sorting(params, pairs)
    name = type_name(params.dtype)
    scratch += [Buffer("act", name, (pairs, params.width)), Buffer("made", name, (pairs, params.hidden))]
    padded: Expr = ("mul", ("cdiv", blocks, config.group), config.group)
    up, down = _products(params, config)
    for entry, arguments, columns, n, warps, stages in (
        ("up", up, params.width, config.up_n, config.up_warps, config.up_stages),
        ("down", down, params.hidden, config.down_n, config.down_warps, config.down_stages),
    ):
        grid = (("mul", padded, -(-columns // n)),)
        launches.append(Launch(entry, grid, arguments, {"num_warps": warps, "num_stages": stages}))
    combined = (
        pointer("made", params.dtype),
        pointer("ids", params.ids_dtype, 1),
        pointer("weights", params.weights_dtype, 1),
        pointer("out", params.dtype),
        _step("ids"),
        _step("weights"),
    )
    launches.append(Launch("combine", (tokens, -(-params.hidden // COLUMNS)), combined, {"num_warps": 4}))
    result = Buffer("out", name, (tokens, params.hidden))
    return LaunchPlan(_operands(params), (result,), tuple(scratch), tuple(launches))


def _step(tensor: str, align: int = 1) -> Argument:
    return Argument(f"{tensor}_token", "i64", ("stride", tensor, 0), align)


def _sorting(params: Params, pairs: Expr) -> list[Launch]:
    ids, counts = pointer("ids", params.ids_dtype, 1), pointer("counts", torch.int32)
    made = [pointer(name, torch.int32) for name in ("order", "block_expert", "blocks")]
    size = (Argument("pairs", "i32", pairs), _step("ids"))
    return [
        Launch("count", (params.experts,), (ids, counts, *size), {"num_warps": 4}),
        Launch("place", (params.experts,), (ids, counts, *made, *size), {"num_warps": 4}),
    ]


def _products(params: Params, config: Config) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """Arguments of up and of down."""
    dtype, align = params.dtype, params.align
    if config.direct:
        where, step = [pointer("ids", params.ids_dtype, 1)], [_step("ids")]
    else:
        where, step = [pointer(name, torch.int32) for name in ("order", "block_expert", "blocks")], []
    up = [pointer("x", dtype, align), *where, pointer("w13", dtype, align)]
    up += [pointer("b13", dtype, align)] if params.up_bias else []
    down = [pointer("act", dtype), *where, pointer("w2", dtype, align)]
    down += [pointer("b2", dtype, align)] if params.down_bias else []
    return (*up, pointer("act", dtype), _step("x", align), *step), (*down, pointer("made", dtype), *step)


def _operands(params: Params) -> tuple[Operand, ...]:
    name, (hidden, lines, experts) = type_name(params.dtype), (params.hidden, 2 * params.width, params.experts)
    first, second = (lines, hidden), (hidden, params.width)
    if params.transposed:
        first, second = first[::-1], second[::-1]
    found = [
        Operand("x", name, (None, hidden)),
        Operand("ids", type_name(params.ids_dtype), (None, params.top_k)),
        Operand("weights", type_name(params.weights_dtype), (None, params.top_k)),
        Operand("w13", name, (experts, *first), packed=3),
        Operand("w2", name, (experts, *second), packed=3),
    ]
    found += [Operand("b13", name, (experts, lines), packed=2)] if params.up_bias else []
    found += [Operand("b2", name, (experts, hidden), packed=2)] if params.down_bias else []
    return tuple(found)


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Every expert that can be hit is read once; rows and results are moved once."""
    tokens = sum(new)
    pairs, each = tokens * params.top_k, 3 * params.hidden * params.width
    moved = min(pairs, params.experts) * each + 2 * tokens * params.hidden
    return Work(2 * pairs * each, moved * params.dtype.itemsize)


SPECS = (
    KernelSpec(
        name="experts",
        op=ops.EXPERTS,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=routed_batch,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-7},
    ),
)
