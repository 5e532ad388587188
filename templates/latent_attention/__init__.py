"""Latent attention in the absorbed form: over the paged cache, and over whole tensors with a mask.

One latent row serves all heads, as key and as value, so a program holds as many heads as its registers allow and the
row is read once. What reads the latents (`attend`) is split over the context where requests and heads alone do not fill
the target; the two products with the heads' own weights are launches of their own, because there each weight is read
once for all tokens. Prompts in the expanded form, which takes a third of the arithmetic, are `latent_prefill`'s; what
that refuses (`is_expanded`) is done in this form whatever the graph says, a tile of tokens a program. With a boolean
mask, blocks before the first and after the last visible key are never read: a static cache is mostly empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused, alignment, next_power_of_2
from deepinfer_compile.ops.registry import Op, Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.templates.latent_attention.arguments import plan
from deepinfer_compile.templates.latent_attention.batch import paged_batch, whole_batch

DTYPES = (torch.float32, torch.bfloat16)
QUERIES = {"decode": 1, "verify": 8}
"""New tokens of a request that share one reading of the paged cache, by phase."""
TILED_ROWS = 128
"""Rows (heads times tokens) of a program in prefill."""
MOST_QUERIES = 64
"""New tokens a request of the form on whole tensors: more of them cost less when the latent is expanded."""
WIDEST = {torch.float32: 256, torch.bfloat16: 512}
"""Elements of a latent row: its tile of accumulators must fit the registers of 8 warps."""
WIDEST_HEAD = 256
"""Elements of a key without its rotary part, and of a value, that latent_prefill takes."""
SMALLEST_TILE = 16
MOST_PIECES = 32
MASKS = ("causal", "bool", "additive")


@dataclass(frozen=True)
class Params:
    """nope, rope: elements of a query's two parts. latent, value: elements of a cache row's first part and of a head's
    result. page: tokens of a page, 0 for whole tensors. queries: new tokens of a request that share one reading. tiled:
    a program has that many tokens of a request, not all of them.
    mask: how what a token sees is given. value_rows: the up-projection of values lies with
    its latent elements side by side. align: elements, of which every row starts at a multiple."""

    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    page: int
    dtype: torch.dtype
    scale: float
    queries: int
    tiled: bool
    mask: str
    value_rows: bool
    align: int

    def __post_init__(self) -> None:
        if min(self.heads, self.nope, self.rope, self.latent, self.value, self.queries) < 1 or self.mask not in MASKS:
            raise ValueError(f"{self.heads} heads of {self.nope} + {self.rope}, mask {self.mask!r}")


@dataclass(frozen=True)
class Config:
    """block_m: rows of a tile of attend. block_n: keys read at a time. pieces: parts of the context, a power of two.
    block_t: tokens of a tile of absorb and project, 1 for a single one, whose pieces are joined where it is projected;
    absorb_n and project_n their columns, project_k its step. pdl: absorb reads its weights before the launch before has
    ended, and what follows the last launch may do so too; merge is there when attend ends. attend and finish have
    nothing to read by then, and to start them early made them 4 us slower."""

    block_m: int
    block_n: int
    pieces: int
    num_warps: int
    num_stages: int
    block_t: int
    absorb_n: int
    project_n: int
    project_k: int
    side_warps: int
    pdl: bool = False


def is_expanded(call: Call) -> bool:
    """Whether a call of cached_latent_attention is for latent_prefill, if for any kernel."""
    given = call.arguments
    widths = (given["w_uk"].shape[1], given["w_uv"].shape[2])
    fit = all(isinstance(n, int) and n <= WIDEST_HEAD for n in widths) and given["scale"] > 0
    return fit and call.phase not in QUERIES and given.get("form") == "expanded"


def bind(call: Call) -> Params | Refused:
    """Params of a call of latent_attention or cached_latent_attention that is not for latent_prefill."""
    return Refused("latent_prefill computes the expanded form") if is_expanded(call) else bind_operands(call)


def bind_operands(call: Call) -> Params | Refused:
    """Params of a call in any form."""
    given = call.arguments
    paged = "latent" in given
    reason = _unfit(call, [*_PAGED, "latent"] if paged else list(_PAGED))
    if reason:
        return Refused(reason)
    q_nope, q_rope, w_uk, w_uv = (given[name] for name in ("q_nope", "q_rope", "w_uk", "w_uv"))
    heads, nope, latent = w_uk.shape
    mask = given.get("mask")
    kind = "causal" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
    tensors = [given[name] for name in ("c", "k_rope")] + ([given["latent"]] if paged else [])
    uv = w_uv.transpose(1, 2) if statically_known_true(w_uv.stride(1) == 1) else w_uv
    return Params(
        heads=heads,
        nope=nope,
        rope=q_rope.shape[-1],
        latent=latent,
        value=w_uv.shape[2],
        page=given["latent"].shape[1] if paged else 0,
        dtype=q_nope.dtype,
        scale=float(given["scale"]),
        queries=QUERIES.get(call.phase, max(1, TILED_ROWS // heads)) if paged else q_nope.shape[2],
        tiled=paged and call.phase not in QUERIES,
        mask=kind,
        value_rows=uv is not w_uv,
        align=alignment(q_nope, q_rope, w_uk, uv, *tensors),
    )


_PAGED = ("q_nope", "q_rope", "c", "k_rope", "w_uk", "w_uv")


def _unfit(call: Call, names: Sequence[str]) -> str:
    """Why the operands are not as the kernel reads them, or nothing."""
    given = call.arguments
    q_nope, w_uv, mask = given["q_nope"], given["w_uv"], given.get("mask")
    if q_nope.dtype not in DTYPES or any(given[name].dtype != q_nope.dtype for name in names):
        return f"operands of {q_nope.dtype} and other types"
    sizes = (*given["w_uk"].shape, *w_uv.shape, given["q_rope"].shape[-1])
    if not all(isinstance(n, int) for n in sizes) or given["w_uk"].shape[2] > WIDEST[q_nope.dtype]:
        return f"latents of {given['w_uk'].shape[2]} elements"
    if "latent" in given and (given["latent"].shape[1] % SMALLEST_TILE or not given["latent"].is_contiguous()):
        return f"pages of {given['latent'].shape[1]} tokens"
    if "latent" not in given and not (isinstance(q_nope.shape[2], int) and q_nope.shape[2] <= MOST_QUERIES):
        return f"{q_nope.shape[2]} new tokens a request"
    for name in names:
        ones = [statically_known_true(given[name].stride(i) == 1) for i in (-1, -2)]
        if not ones[0] and not (name == "w_uv" and ones[1]):
            return f"the elements of {name!r} rows do not lie side by side"
    return _unfit_mask(mask, q_nope)


def _unfit_mask(mask: Tensor | None, q_nope: Tensor) -> str:
    if mask is None:
        return ""
    if mask.dtype not in (torch.bool, q_nope.dtype):
        return f"a mask of {mask.dtype}"
    full = (mask.shape[0], mask.shape[2]) if mask.dim() == 4 else (0, 0)
    if mask.dim() != 4 or not all(
        statically_known_true(a == b) for a, b in zip(full, (q_nope.shape[0], q_nope.shape[2]))
    ):
        return "a mask that is not expanded over requests and tokens"
    return "" if statically_known_true(mask.shape[1] == 1) else "a mask a head"


def _tile(number: int) -> int:
    return max(SMALLEST_TILE, next_power_of_2(number))


def _shared_bytes(params: Params, config: Config) -> int:
    """An upper estimate of on-chip memory of attend: the query tile, the weights, and latent rows in flight."""
    row = _tile(params.latent) + _tile(params.rope)
    tile = config.block_m * (row + config.block_n)
    # tiles of 64 rows go to units that read shared memory themselves, so a stage more is kept there
    in_flight = config.num_stages if config.block_m >= 64 else max(1, config.num_stages - 1)
    return (tile + in_flight * config.block_n * row) * params.dtype.itemsize


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    fits = _shared_bytes(params, config) <= limits.shared_bytes
    warps = max(config.num_warps, config.side_warps) <= limits.max_warps
    # accumulators of a row tile are kept in registers, at most 128 a thread
    light = config.block_m * _tile(params.latent) <= config.num_warps * 32 * 128
    # a tile's elements are addressed by 32 bits
    light = light and params.heads * params.queries * config.pieces * params.latent < 2**31
    useful = config.num_warps <= max(1, config.block_m * config.block_n // SMALLEST_TILE**2)
    return fits and warps and light and useful and (not params.page or params.page % config.block_n == 0)


def _sides(params: Params, tokens: int) -> dict[str, int]:
    """Tiles of the two products: all tokens at once where they fit, so that a weight is read once."""
    wide = params.dtype == torch.float32
    block_t = 1 if tokens == 1 else 16 if tokens <= 16 or wide else 32 if tokens <= 32 else 64
    return {
        "block_t": block_t,
        "absorb_n": min(64 if wide else 128, _tile(params.latent)),
        "project_n": min(64, _tile(params.value)),
        "project_k": min(32 if wide else 64, _tile(params.latent)),
        "side_warps": 4,
    }


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """As many heads a program as registers allow while the context can still be split over all cores."""
    rows = params.heads * params.queries
    requests = max(1, tokens // params.queries)
    for block_m in (64, 32, 16):
        programs = requests * -(-rows // block_m)
        if block_m <= _tile(rows) and (programs * MOST_PIECES >= limits.cores or block_m == SMALLEST_TILE):
            found = _fitting(params, limits, block_m, programs, tokens)
            if found is not None:
                return found
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def _fitting(params: Params, limits: Limits, block_m: int, programs: int, tokens: int) -> Config | None:
    """The largest block of keys that is legal for a tile, and pieces that fill every core's memory once."""
    sides = _sides(params, tokens)
    for block_n, stages, warps in product((64, 32, 16), (2, 1), (8, 4, 2, 1)):
        if warps == 8 and block_m < 64:
            continue
        config = Config(block_m, block_n, 1, warps, stages, **sides, pdl=limits.pdl and not params.tiled)
        if _is_legal(params, config, limits):
            if params.tiled:
                return config
            together = min(2, limits.shared_bytes // _shared_bytes(params, config))
            pieces = next_power_of_2(max(1, together * limits.cores // programs))
            return replace(config, pieces=min(MOST_PIECES, pieces))
    return None


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    most = min(_tile(params.heads * params.queries), 128)
    sides = [dict(items) for items in {tuple(_sides(params, n).items()): None for n in (1, 16, 32, 64)}]
    tiles = [m for m in (16, 32, 64, 128) if m <= most]
    parts = (1,) if params.tiled else (1, 2, 4, 8, 16, 32)
    for m, n, pieces, warps, stages in product(tiles, (16, 32, 64, 128), parts, (1, 2, 4, 8), (1, 2, 3)):
        for side in sides:
            config = Config(m, n, pieces, warps, stages, **side, pdl=limits.pdl and not params.tiled)
            if _is_legal(params, config, limits):
                yield config


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """A latent row that a request sees is read once; weights of heads, queries, new rows and results are moved once."""
    tokens, row, heads = sum(new), params.latent + params.rope, params.heads
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(new, lengths) if n)
    weights = heads * params.latent * (params.nope + params.value)
    context = sum(length for n, length in zip(new, lengths) if n)
    fresh = tokens * row if params.page else 0
    moved = context * row + fresh + weights + tokens * heads * (params.nope + params.rope + params.value)
    return Work(2 * tokens * weights + 2 * heads * pairs * (row + params.latent), moved * params.dtype.itemsize)


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(4, 12, 8, 24, 20, PAGE_SIZE, torch.float32, 0.2, 1, False, "causal", True, 4)
    return Case(name, replace(usual, **changes), new, lengths)


BF16 = {"dtype": torch.bfloat16, "nope": 32, "rope": 16, "latent": 64, "value": 32, "align": 16, "scale": 0.1}
V3 = {"heads": 128, "nope": 128, "rope": 64, "latent": 512, "value": 128, "dtype": torch.bfloat16, "align": 16}
PAGED = (
    _case("one", (1,), (1,), heads=1, nope=1, rope=1, latent=1, value=1, align=1),
    _case("block", (1, 1, 1), (63, 64, 65)),
    _case("single", (1,), (130,), heads=6, value_rows=False, **BF16),
    _case("nobody", (1,), (0,), heads=2),
    _case("empty", (1, 1, 1, 1), (130, 0, 64, 1), heads=6, **BF16),
    _case("long", (1, 1), (321, 70), latent=200, heads=2),
    _case("absent", (1, 0, 1), (65, 0, 63), heads=3, value_rows=False),
    _case("verify", (3, 1, 8, 11), (3, 64, 70, 130), queries=8),
    _case("wide", (2, 5), (66, 40), queries=8, heads=5, **BF16),
    _case("prompts", (70, 1, 0, 33), (100, 1, 65, 33), queries=32, tiled=True),
    _case("chunk", (19, 9), (150, 9), heads=6, queries=21, tiled=True, **BF16),
    _case("typical", (1,) * 64, (4096,) * 64, **V3),
    _case("prefill", (4096,) * 4, (4096,) * 4, tiled=True, **V3),
    _case("largest", (1,) * 256, (8192,) * 256, **V3),
)
WHOLE = {"page": 0}
DENSE = (
    _case("one", (1,), (1,), heads=1, nope=1, rope=1, latent=1, value=1, align=1, **WHOLE),
    _case("causal", (3, 3), (70, 70), queries=3, **WHOLE),
    _case("single", (1,), (150,), latent=72, value=24, heads=3, **WHOLE),
    _case("mask", (1, 1, 1), (130, 7, 66), mask="bool", heads=20, **WHOLE, **BF16),
    _case("unseen", (2, 2, 2), (40, 0, 65), queries=2, mask="bool", value_rows=False, **WHOLE),
    _case("additive", (2, 2), (33, 64), queries=2, mask="additive", heads=3, **WHOLE),
    _case("typical", (1,) * 64, (4096,) * 64, mask="bool", **WHOLE, **V3),
)


def _spec(op: Op, cases: tuple[Case[Params], ...], inputs: Any) -> KernelSpec[Params, Config]:
    return KernelSpec(
        name="latent_attention",
        op=op,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=cases,
        inputs=inputs,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-6},
    )


SPECS = (_spec(ops.CACHED_LATENT_ATTENTION, PAGED, paged_batch), _spec(ops.LATENT_ATTENTION, DENSE, whole_batch))
