"""The choice of rows of a shared cache by small keys, and of the blocks that later layers choose from.

Scores go to memory, as a line of fp32 a token. Parts of a line are narrowed to as many rows as are wanted, by programs
of their own that hold their part in registers; one more chooses among what these have kept. Each finds a threshold by
halving, among whole numbers in the order of the scores, and among row numbers where several scores are at it. With
candidates a line holds the scores of their rows only, in the order of the list, whose blocks are taken to be distinct,
as this kernel makes them. Keys that are packed become numbers as they are read.
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
    side_by_side,
)
from deepinfer_compile.ops.packed import FORMS, row_bytes, stored_type
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.templates.select_rows.arguments import plan
from deepinfer_compile.templates.select_rows.batch import batch

DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 256
"""Elements of a key."""
MOST_HEADS = 64
LONGEST = 8192
"""Candidates, which a program holds to see where they end."""
SMALLEST_TILE = 16
PIECES = (1, 8, 64, 256)
TOGETHER = 4
"""New tokens of a request that share one reading of its keys, where it has several."""
SOME, MANY = 32, 512
"""Tokens whose programs fill the target, where a line has many parts and where it has few."""
NARROWING = ((256, 1), (1024, 4), (2048, 8), (2048, 4), (4096, 4), (4096, 8), (4096, 16))
"""Places that narrow holds, with its warps."""
CHOOSING = ((1024, 1), (4096, 4), (8192, 16))
"""Places that choose holds, with its warps."""


@dataclass(frozen=True)
class Params:
    """width: elements of a key. page: rows of a page. ratio, top, block, blocks: as in the operation. limit: candidates
    of a token, 0 where there are none. align: elements, of which every row starts at a multiple. queries: new tokens of
    a request that may share its keys. form: of packed keys, whose rows start at multiples of `bytes_align` bytes."""

    heads: int
    width: int
    page: int
    ratio: int
    top: int
    limit: int
    block: int
    blocks: int
    scale: float
    dtype: torch.dtype
    weights_dtype: torch.dtype
    align: int
    queries: int = 1
    form: tuple[int, ...] = ()
    bytes_align: int = 1

    def __post_init__(self) -> None:
        if self.form and (self.form not in FORMS or self.width % self.form[1]):
            raise ValueError(f"keys of {self.width} in the form {self.form}")
        if min(self.heads, self.width, self.page, self.ratio, self.top, self.block) < 1:
            raise ValueError(f"{self.heads} heads of {self.width}, ratio {self.ratio}, {self.top} rows")
        if min(self.limit, self.blocks) < 0:
            raise ValueError(f"{self.limit} candidates, {self.blocks} to make")


@dataclass(frozen=True)
class Config:
    """block_n: rows scored at a time. block_k: elements of them multiplied at a time. pieces: parts of a line that are
    scored apart. tokens: of a program that scores, one where they have candidates. block_s: places of a line that
    narrow holds. held: of those that it kept what choose holds, which else reads block_s of them at a time. Powers of
    two."""

    block_n: int
    block_k: int
    pieces: int
    num_warps: int
    num_stages: int
    block_s: int
    narrow_warps: int
    held: int
    choose_warps: int
    tokens: int = 1


def bind(call: Call) -> Params | Refused:
    """Params of a call of cached_select_rows."""
    given = call.arguments
    q, weights, keys, candidates = (given[name] for name in ("q", "weights", "keys", "candidates"))
    form = tuple(given["form"] or ())
    if q.dtype not in DTYPES or keys.dtype != stored_type(q.dtype, form) or weights.dtype not in DTYPES:
        return Refused(f"{q.dtype} queries with {keys.dtype} keys and {weights.dtype} weights")
    sizes = (*q.shape[1:], *keys.shape[1:], *(() if candidates is None else candidates.shape[1:]))
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return Refused("its head count, width or number of candidates is not fixed")
    if q.shape[1] > MOST_HEADS or q.shape[2] > WIDEST:
        return Refused(f"{q.shape[1]} heads of {q.shape[2]} elements, more than {MOST_HEADS} of {WIDEST}")
    if form and (form not in FORMS or keys.shape[2] != row_bytes(q.shape[2], form)):
        return Refused(f"keys of {keys.shape[2]} bytes for {q.shape[2]} elements in the form {form}")
    if given["top"] < 1 or (given["block"] < 1 and (candidates is not None or given["blocks"] > 0)):
        return Refused(f"a choice of {given['top']} rows, blocks of {given['block']}")
    if candidates is not None and candidates.shape[1] > LONGEST:
        return Refused(f"more than {LONGEST} candidates")
    for name in ("q", "weights", "keys"):
        if not side_by_side(given[name]):
            return Refused(f"the elements of {name!r} rows do not lie side by side")
    return Params(
        heads=q.shape[1],
        width=q.shape[2],
        page=keys.shape[1],
        ratio=int(given["ratio"]),
        top=int(given["top"]),
        limit=0 if candidates is None else candidates.shape[1],
        block=max(1, int(given["block"])),
        blocks=int(given["blocks"]),
        scale=float(given["scale"]),
        dtype=q.dtype,
        weights_dtype=weights.dtype,
        align=alignment(q) if form else alignment(q, keys),
        queries=1 if call.phase == "decode" else TOGETHER,
        form=form,
        bytes_align=alignment(keys) if form else 1,
    )


def _tile(number: int) -> int:
    return max(SMALLEST_TILE, next_power_of_2(number))


def _step(params: Params) -> int:
    """Elements multiplied at a time: in fp32, where both sides lie in registers, a few; all of what is packed."""
    if params.form:
        return max(SMALLEST_TILE, next_power_of_2(params.width // params.form[1]) * params.form[1])
    return min(_tile(params.width), 32 if params.dtype == torch.float32 else WIDEST)


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    heads, width = config.tokens * _tile(params.heads), config.block_k
    if config.tokens > 1 and (params.limit or params.queries == 1 or width < _tile(params.width)):
        return False
    shared = heads * (width + config.block_n) + (config.num_stages + 1) * config.block_n * _tile(params.width)
    lanes = config.num_warps * 32
    # a lane has at most 64 scores and 128 elements of queries or keys
    light = heads * config.block_n <= 64 * lanes and max(heads, config.block_n) * width <= 128 * lanes
    useful = config.num_warps <= max(1, heads * config.block_n // SMALLEST_TILE**2)
    warps = max(config.num_warps, config.narrow_warps, config.choose_warps) <= limits.max_warps
    return shared * params.dtype.itemsize <= limits.shared_bytes and light and useful and warps


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """As many rows at a time as fit, several tokens where requests have them, and pieces until every core has two
    programs."""
    # many tokens fill the target with programs of few warps, which wait less for each other
    narrow, choose = 4 if tokens >= SOME else 8, 4 if tokens >= MANY else 16
    ends = *_most(NARROWING, min(narrow, limits.max_warps)), *_most(CHOOSING, min(choose, limits.max_warps))
    for several, block_n in product({params.queries: 0, 1: 0}, (128, 64, 32, 16)):
        # packed keys of more rows would not leave several tokens their registers
        if params.form and several > 1 and block_n == 128:
            continue
        wanted = 2 * limits.cores // max(1, tokens // several)
        pieces = next((n for n in PIECES if n >= wanted), PIECES[-1])
        # the sums of several tokens fill eight warps, which keep no room for rows ahead
        for stages, warps in product((1,) if several > 1 else (3, 2, 1), (8, 4, 2) if several > 1 else (4, 8, 2)):
            config = Config(block_n, _step(params), pieces, warps, stages, *ends, several)
            if _is_legal(params, config, limits):
                return config
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def _most(pairs: tuple[tuple[int, int], ...], warps: int) -> tuple[int, int]:
    """The last pair with at most so many warps."""
    return [pair for pair in pairs if pair[1] <= warps][-1]


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    scoring = product((16, 32, 64, 128), PIECES, (2, 4, 8), (1, 2, 3), (1, 2, TOGETHER))
    for (block_n, pieces, warps, stages, several), narrow, choose in product(scoring, NARROWING, CHOOSING):
        config = Config(block_n, _step(params), pieces, warps, stages, *narrow, *choose, several)
        if _is_legal(params, config, limits):
            yield config


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Every token is scored against the rows of a request, whose keys are read once."""
    tokens, context, heads = sum(new), sum(lengths), params.heads
    flops = 2 * tokens * heads * params.width * context // (params.ratio * max(1, len(lengths)))
    given = tokens * heads * (params.width * params.dtype.itemsize + params.weights_dtype.itemsize)
    row = row_bytes(params.width, params.form) if params.form else params.width * params.dtype.itemsize
    return Work(flops, given + context // params.ratio * row)


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], ratio: int, **changes: Any) -> Case[Params]:
    f32 = torch.float32
    usual = Params(4, 20, PAGE_SIZE // ratio, ratio, 5, 0, 3, 2, 0.5, f32, f32, 4)
    return Case(name, replace(usual, **changes), new, lengths)


BF16 = {"dtype": torch.bfloat16, "width": 32, "align": 16, "heads": 8}
KEYS = (4, 32, 1)
V41 = {"heads": 32, "width": 128, "top": 512, "block": 8, "scale": 2**-4, "dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", (1,), (1,), 1, heads=1, width=12, top=1, blocks=0),
    _case("many", (1, 1, 1), (127, 128, 300), 2, top=40, block=8, blocks=6, width=72, align=8),
    _case("few", (1, 1, 0, 3), (5, 0, 0, 2), 4, top=12, blocks=9),
    _case("limited", (1, 1, 1), (200, 64, 9), 1, limit=7, block=4, blocks=0, top=11, width=8, align=8),
    _case("both", (1, 2, 1), (250, 130, 1), 2, limit=12, block=3, blocks=4, heads=6),
    _case("verify", (3, 1, 4), (2, 64, 130), 4, width=24, align=8, heads=17, queries=4),
    _case("prompts", (12, 1, 0, 9), (100, 1, 65, 9), 1, top=20, block=8, blocks=3, queries=4),
    _case("chunk", (9, 3), (150, 3), 2, weights_dtype=torch.bfloat16, limit=20, block=2, blocks=0, **BF16),
    _case("narrow rows", (1, 1), (200, 64), 1, limit=7, block=8, blocks=0, dtype=torch.bfloat16, heads=8, width=20),
    _case("packed", (1, 2, 1), (127, 3, 300), 2, top=40, blocks=6, width=96, align=8, queries=4, form=KEYS),
    _case(
        "bytes",
        (4, 1),
        (150, 64),
        1,
        limit=20,
        block=2,
        blocks=0,
        **{**BF16, "width": 64},
        form=(8, 32, 1),
        bytes_align=2,
    ),
    _case("typical", (1,) * 64, (32768,) * 64, 4, blocks=2048, **V41),
    _case("stored", (1,) * 64, (32768,) * 64, 2, blocks=2048, **V41, form=KEYS, bytes_align=4),
    _case("narrow", (1,) * 64, (32768,) * 64, 4, limit=2048, blocks=0, **V41),
    _case("prefill", (2048,), (8192,), 4, blocks=2048, queries=4, **V41),
    _case("largest", (1,) * 64, (131072,) * 64, 1, blocks=2048, **V41),
)

SPECS = (
    KernelSpec(
        name="select_rows",
        op=ops.CACHED_SELECT_ROWS,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=batch,
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
        unordered=True,
    ),
)
