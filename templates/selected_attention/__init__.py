"""Attention over a window of latents and over rows chosen by number, from two caches, in one softmax.

A token has a list of its own, so a program serves one token, and as many heads as registers allow: a latent is key and
value of all of them and is read once. Where tokens and tiles of heads do not fill the target, what a token sees is
split into pieces. The rows are a list, not a mask: what is not chosen is never touched.
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
from deepinfer_compile.templates.selected_attention.arguments import plan
from deepinfer_compile.templates.selected_attention.batch import batch

DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 512
"""Elements of a latent: its tile of accumulators must fit the registers of 8 warps."""
LONGEST = 8192
"""Rows of a list, which a program holds to see where it ends."""
SMALLEST_TILE = 16
MOST_PIECES = 16


@dataclass(frozen=True)
class Params:
    """width: elements of a latent. page, rows_page: tokens and rows of a page, the latter 0 without rows. top: rows of
    a list. sinks: whether there are sink logits. align: elements, of which every row starts at a multiple. form,
    rows_form: of latents and rows that are packed, which start at multiples of `bytes_align` bytes."""

    heads: int
    width: int
    page: int
    rows_page: int
    top: int
    window: int
    scale: float
    sinks: bool
    sinks_dtype: torch.dtype
    dtype: torch.dtype
    align: int
    form: tuple[int, ...] = ()
    rows_form: tuple[int, ...] = ()
    bytes_align: int = 1

    def __post_init__(self) -> None:
        for form in (self.form, self.rows_form):
            if form and (form not in FORMS or self.width % form[1]):
                raise ValueError(f"latents of {self.width} in the form {form}")
        if min(self.heads, self.width, self.page, self.window) < 1 or (self.rows_page > 0) != (self.top > 0):
            raise ValueError(f"{self.heads} heads of {self.width}, window {self.window}, {self.top} rows")

    def stored(self, form: tuple[int, ...]) -> int:
        """Elements of a latent or row as it is stored."""
        return row_bytes(self.width, form) if form else self.width


@dataclass(frozen=True)
class Config:
    """block_m: heads of a program. block_n: latents read at a time, a divisor of the page. pieces: parts of what a
    token sees, a power of two."""

    block_m: int
    block_n: int
    pieces: int
    num_warps: int
    num_stages: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of cached_selected_attention."""
    given = call.arguments
    q, cache, rows, chosen, sinks = (given[name] for name in ("q", "cache", "rows", "chosen", "sinks"))
    reason = _unfit(call)
    if reason:
        return Refused(reason)
    form, rows_form = (tuple(given[name] or ()) for name in ("form", "rows_form"))
    held = ((form, given["latents"]), (form, cache), (rows_form, rows))
    return Params(
        heads=q.shape[1],
        width=q.shape[2],
        page=cache.shape[1],
        rows_page=0 if rows is None else rows.shape[1],
        top=0 if chosen is None else chosen.shape[1],
        window=int(given["window"]),
        scale=float(given["scale"]),
        sinks=sinks is not None,
        sinks_dtype=q.dtype if sinks is None else sinks.dtype,
        dtype=q.dtype,
        align=alignment(q, *(t for packed, t in held if not packed)),
        form=form,
        rows_form=rows_form,
        bytes_align=alignment(*(t for packed, t in held if packed)) if form or rows_form else 1,
    )


def _unfit(call: Call) -> str:
    """Why the operands are not as the kernel reads them, or nothing."""
    given = call.arguments
    q, cache, rows, chosen, sinks = (given[name] for name in ("q", "cache", "rows", "chosen", "sinks"))
    latents = {n: given[n] for n in ("q", "latents", "cache", "rows") if given[n] is not None}
    forms = {"latents": given["form"], "cache": given["form"], "rows": given["rows_form"]}
    if q.dtype not in DTYPES or any(t.dtype != stored_type(q.dtype, forms.get(n)) for n, t in latents.items()):
        return f"{q.dtype} queries with a {cache.dtype} cache"
    for name, form in ((n, tuple(form)) for n, form in forms.items() if n in latents and form):
        if form not in FORMS or latents[name].shape[-1] != row_bytes(q.shape[2], form):
            return f"{name} of {latents[name].shape[-1]} bytes for {q.shape[2]} elements in the form {form}"
    if sinks is not None and sinks.dtype not in DTYPES:
        return f"sinks of {sinks.dtype}"
    if len({given[name] is None for name in ("rows", "written", "rows_table", "chosen")}) > 1:
        return "rows without their page table, or without a choice of them"
    sizes = [*q.shape[1:], *cache.shape[1:], *(() if rows is None else (*rows.shape[1:], chosen.shape[1]))]
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return "its head count, width or list is not fixed"
    if q.shape[2] > WIDEST or cache.shape[1] % SMALLEST_TILE:
        return f"latents of {q.shape[2]} elements, pages of {cache.shape[1]} tokens"
    if given["window"] < 1 or (chosen is not None and chosen.shape[1] > LONGEST):
        return f"a window of {given['window']} tokens or a list of more than {LONGEST} rows"
    apart = [name for name, t in latents.items() if not side_by_side(t)]
    return f"the elements of {apart[0]!r} rows do not lie side by side" if apart else ""


def _tile(number: int) -> int:
    return max(SMALLEST_TILE, next_power_of_2(number))


def _shared_bytes(params: Params, config: Config) -> int:
    """An upper estimate of on-chip memory of attend: the query tile, the weights, and latents in flight."""
    row = _tile(params.width)
    tile = config.block_m * (row + config.block_n)
    # tiles of 64 rows go to units that read shared memory themselves, so up to two stages more are kept there
    in_flight = config.num_stages + 1 if config.block_m >= 64 else max(1, config.num_stages - 1)
    return (tile + in_flight * config.block_n * row) * params.dtype.itemsize


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    fits = _shared_bytes(params, config) <= limits.shared_bytes and config.num_warps <= limits.max_warps
    # accumulators are kept in registers, at most 128 a thread; small tiles also keep what they multiply there
    light = config.block_m * _tile(params.width) <= config.num_warps * 32 * (128 if config.block_m >= 64 else 64)
    scores, warps = config.block_m * config.block_n, config.num_warps
    useful = warps <= max(1, config.block_m * max(config.block_n, _tile(params.width)) // SMALLEST_TILE**2)
    # in fp32 both sides of a product lie in registers, and a lane works on scores of its own
    if params.dtype == torch.float32:
        light, useful = light and scores * _tile(params.width) <= warps * 16384, warps <= scores // 32
    return fits and light and useful and params.page % config.block_n == 0


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """As many heads a program as registers allow while pieces can still fill all cores."""
    for block_m in (64, 32, 16):
        programs = max(1, tokens) * -(-params.heads // block_m)
        if block_m <= _tile(params.heads) and (programs * MOST_PIECES >= limits.cores or block_m == SMALLEST_TILE):
            found = _fitting(params, limits, block_m, programs)
            if found is not None:
                return found
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def _fitting(params: Params, limits: Limits, block_m: int, programs: int) -> Config | None:
    """The largest block of latents that leaves room for the next one, else for itself, and pieces that fill every core
    once, none without a block."""
    # what is packed is unpacked in registers, where rows ahead would take the place of more rows
    ahead = (1,) if params.form or params.rows_form else (2, 1)
    for stages, block_n, warps in product(ahead, (64, 32, 16), (8, 4, 2)):
        config = Config(block_m, block_n, 1, warps, stages)
        # eight warps for what fills them, and for more addresses than four hold
        few, many = block_m * _tile(params.width) < 8192, block_n * _tile(params.width) > 16384
        if (few and warps == 8) or (many and warps < 8) or not _is_legal(params, config, limits):
            continue
        together = min(2, limits.shared_bytes // _shared_bytes(params, config))
        blocks = -(-(params.window + params.top) // block_n)
        pieces = min(next_power_of_2(max(1, together * limits.cores // programs)), next_power_of_2(blocks))
        return replace(config, pieces=min(MOST_PIECES, pieces))
    return None


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    tiles = [m for m in (16, 32, 64, 128) if m <= _tile(params.heads)]
    for m, n, pieces, warps, stages in product(tiles, (16, 32, 64), (1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 3)):
        config = Config(m, n, pieces, warps, stages)
        if _is_legal(params, config, limits):
            yield config


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """What a token sees is read once for all its heads; queries, new latents and results are moved once."""
    tokens, ratio = sum(new), params.page // params.rows_page if params.rows_page else 1
    near, keys = 0, 0
    for count, length in zip(new, lengths):
        for position in range(max(0, length - count), length):
            near += min(position + 1, params.window)
            keys += min((position + 1) // ratio, params.top)
    each = [params.stored(f) * (1 if f else params.dtype.itemsize) for f in (params.form, params.rows_form)]
    moved = tokens * 2 * params.heads * params.width * params.dtype.itemsize
    moved += (near + 2 * tokens) * each[0] + keys * each[1]
    return Work(4 * params.heads * params.width * (near + keys), moved)


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    f32 = torch.float32
    usual = Params(4, 20, PAGE_SIZE, PAGE_SIZE // 4, 12, 20, 0.2, True, f32, f32, 4)
    return Case(name, replace(usual, **changes), new, lengths)


ALONE = {"rows_page": 0, "top": 0}
BF16 = {"dtype": torch.bfloat16, "width": 64, "align": 16, "scale": 0.125}
V41 = {"heads": 64, "width": 512, "top": 512, "window": 128, "dtype": torch.bfloat16, "align": 16, "scale": 512**-0.5}
CASES = (
    _case("one", (1,), (1,), heads=1, width=12, sinks=False),
    _case("block", (1, 1, 1), (63, 64, 65), width=24, align=8, rows_page=PAGE_SIZE),
    _case("window", (1, 1, 3), (200, 20, 2), window=70, heads=6, **ALONE),
    _case("empty", (1, 1, 0, 1), (130, 0, 0, 64), heads=20, window=128, top=40, **BF16),
    _case("odd", (1, 1, 1), (70, 3, 131), heads=17, width=8, rows_page=PAGE_SIZE // 2, sinks=False, align=8),
    _case("bare", (2, 1), (1, 66), heads=3, width=12, sinks=False),
    _case("verify", (3, 1, 8, 11), (2, 64, 70, 130), top=5, heads=6),
    _case("prompts", (70, 1, 0, 33), (100, 1, 65, 33), width=12, heads=2),
    _case("chunk", (19, 9), (150, 9), heads=6, top=50, sinks_dtype=torch.bfloat16, **BF16),
    _case("packed", (1, 2, 1), (70, 2, 131), width=96, heads=5, form=(8, 32, 1), rows_form=(4, 16, 0), align=8),
    _case("bytes", (3, 1), (150, 0), rows_form=(8, 16, 0), bytes_align=4, **BF16),
    _case("stored", (2, 1), (65, 4), window=40, form=(4, 32, 1), **ALONE, **BF16),
    _case("typical", (1,) * 64, (4096,) * 64, **V41),
    _case("published", (1,) * 64, (4096,) * 64, **V41, form=(8, 32, 1), rows_form=(4, 16, 0), bytes_align=16),
    _case("prefill", (4096,), (8192,), **V41),
    _case("largest", (1,) * 256, (65536,) * 256, **{**V41, "heads": 128}),
)

SPECS = (
    KernelSpec(
        name="selected_attention",
        op=ops.CACHED_SELECTED_ATTENTION,
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
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-7},
    ),
)
