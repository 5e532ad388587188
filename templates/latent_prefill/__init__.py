"""Latent attention of prompts in the expanded form, with what a prompt's earlier part left in the cache.

Absorbed, a pair of tokens costs two products over the latent row; expanded, two over a head's own widths, a third of
that or less, for one up-projection of each new token. So the new tokens attend to each other through keys and values in
scratch memory, two rows a token and head. Tokens that are in the cache already (a chunk after the first, a kept prefix)
are read as they lie, absorbed: expanding them would take memory that nobody can size without asking the device. The two
parts meet by their log-sum-exp. A row of that second part is one head of one token, so that a request with a single
new token, of which a step of prompts may have some, fills its tiles too. Without earlier tokens the second part is
three launches whose programs end at once, several heads a program so that there are few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused, next_power_of_2
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.templates import latent_attention
from deepinfer_compile.templates.latent_attention.batch import paged_batch
from deepinfer_compile.templates.latent_prefill.arguments import SIDE_STAGES, SMALLEST_TILE, plan, tile
from deepinfer_compile.templates.latent_prefill.params import Config, Params

ACCUMULATORS = 128
"""fp32 sums that a thread keeps in registers, of one product or of two that are both summed up."""
SCORES = 32
"""What attend keeps beside them: its scores do not live as long as its sums."""
FEWEST_WARPS = 4
"""What the matrix units take together; more than one for 16 x 16 elements of a tile repeat each other's work."""
MOST_HEADS = 8
"""Heads of a program of the launches that look back."""
LADDER = 17
"""Powers of two of tokens that have a default of their own."""


class Tile(NamedTuple):
    """One launch's part of a Config: new tokens, keys (or latent elements) at a time, warps, stages."""

    m: int
    n: int
    warps: int
    stages: int


ATTEND = (
    Tile(128, 128, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 32, 8, 2),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 2),
    Tile(32, 32, 4, 2),
    Tile(16, 16, 4, 1),
)
EXPAND = (
    Tile(128, 64, 8, 3),
    Tile(128, 32, 8, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 8, 3),
    Tile(64, 32, 8, 2),
    Tile(32, 32, 4, 2),
    Tile(16, 16, 4, 1),
)
PAST = (
    Tile(64, 64, 8, 2),
    Tile(64, 32, 8, 2),
    Tile(64, 32, 4, 2),
    Tile(32, 32, 4, 2),
    Tile(16, 32, 4, 2),
    Tile(16, 16, 4, 1),
)
"""Best first; the first that is legal is taken. Rows before keys, since a tile's rows share one reading of them; keys
before stages, since a block's sums are rescaled once."""
EXACT = 32
"""Rows of a tile of fp32, which the matrix units cannot do: a larger one is unrolled into more code than registers
hold."""


def bind(call: Call) -> Params | Refused:
    """Params of a call of cached_latent_attention."""
    if not latent_attention.is_expanded(call):
        return Refused("it computes the expanded form of a prefill, of heads that fit its tiles")
    found = latent_attention.bind_operands(call)
    if isinstance(found, Refused):
        return found
    kept = ("heads", "nope", "rope", "latent", "value", "page", "dtype", "scale", "value_rows", "align")
    return Params(**{name: getattr(found, name) for name in kept})


def _warps(part: Tile, width: int, limits: Limits, most: int = ACCUMULATORS) -> bool:
    """Whether a tile of that many columns keeps its warps busy, and up to `most` sums a thread in registers."""
    useful = max(FEWEST_WARPS, part.m * width // SMALLEST_TILE**2)
    return part.m * width <= most * 32 * part.warps and part.warps <= min(limits.max_warps, useful)


def _fits_attend(params: Params, part: Tile, limits: Limits) -> bool:
    """The query tile and keys and values in flight on chip, scores and sums in registers."""
    query, value = tile(params.nope) + tile(params.rope), tile(params.value)
    # larger tiles keep the weights in registers
    weights = part.n if part.m < 64 else 0
    elements = part.m * (query + weights) + part.stages * part.n * (query + value)
    fits = elements * params.dtype.itemsize <= limits.shared_bytes
    return fits and _warps(part, part.n + value, limits, ACCUMULATORS + SCORES)


def _fits_expand(params: Params, part: Tile, limits: Limits) -> bool:
    """Latents and both weights in flight; the sums pass through shared memory once, on their way out."""
    width = tile(params.nope) + tile(params.value)
    flying = part.stages * part.n * (part.m + width) * params.dtype.itemsize
    out = part.m * max(tile(params.nope), tile(params.value)) * torch.float32.itemsize
    return max(flying, out) <= limits.shared_bytes and part.n <= tile(params.latent) and _warps(part, width, limits)


def _fits_past(params: Params, part: Tile, limits: Limits) -> bool:
    """The absorbed query tile and cached rows in flight."""
    latent, rope = tile(params.latent), tile(params.rope)
    elements = part.stages * part.n * (latent + rope) + part.m * (latent + rope + part.n)
    fits = elements * params.dtype.itemsize <= limits.shared_bytes
    return fits and params.page % part.n == 0 and _warps(part, max(latent, part.n), limits)


def _fits_side(params: Params, m: int, k: int, limits: Limits) -> bool:
    """The products with weights around look_back."""
    nope, value = tile(params.nope), tile(params.value)
    elements = max(nope * (m + SIDE_STAGES * k), SIDE_STAGES * k * (m + value))
    return elements * params.dtype.itemsize <= limits.shared_bytes and k <= tile(params.latent)


def _config(attend: Tile, expand: Tile, past: Tile, k: int, heads: int) -> Config:
    return Config(*attend, *expand, past.m, past.n, k, heads, past.warps, past.stages)


def _parts(config: Config) -> tuple[Tile, Tile, Tile]:
    """The tiles of attend, of expand and of look_back."""
    one = Tile(config.block_m, config.block_n, config.num_warps, config.num_stages)
    two = Tile(config.expand_m, config.expand_k, config.expand_warps, config.expand_stages)
    return one, two, Tile(config.past_m, config.past_n, config.past_warps, config.past_stages)


_Fits = Callable[[Params, Tile, Limits], bool]


def _first(params: Params, limits: Limits, parts: tuple[Tile, ...], fits: _Fits, most: int) -> Tile:
    """The first legal tile of at most so many tokens. Raises ValueError."""
    rows = min(most, EXACT) if params.dtype == torch.float32 else most
    for part in parts:
        narrow = part._replace(warps=min(part.warps, limits.max_warps))
        if narrow.m <= rows and fits(params, narrow, limits):
            return narrow
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Large tiles, smaller ones where they would leave cores idle. A program that looks back has several heads where
    that leaves enough programs."""
    tokens = min(next_power_of_2(max(1, tokens)), 1 << LADDER)
    most = 128 if tokens > 64 and -(-tokens // 128) * params.heads >= limits.cores else 64
    past = _first(params, limits, PAST, _fits_past, most)
    widest = EXACT if params.dtype == torch.float32 else 64
    sides = [k for k in (64, 32, 16) if k <= widest and _fits_side(params, past.m, k, limits)]
    if not sides:
        raise ValueError(f"no product of {params} with its weights fits {limits.shared_bytes} bytes")
    heads = MOST_HEADS
    while heads > 1 and -(-tokens // past.m) * -(-params.heads // heads) < 4 * limits.cores:
        heads //= 2
    attend = _first(params, limits, ATTEND, _fits_attend, most)
    return _config(attend, _first(params, limits, EXPAND, _fits_expand, most), past, sides[0], heads)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """The defaults, then each launch's part varied beside the others' default."""
    found = dict.fromkeys(default(params, limits, 1 << i) for i in range(LADDER + 1))
    sizes = (16, 32) if params.dtype == torch.float32 else (32, 64, 128)
    for base in {_parts(c): c for c in found}.values():
        attend, expand, past = _parts(base)
        k, heads = base.past_k, base.past_heads
        for part in (Tile(*sizes) for sizes in product(sizes, sizes, (4, 8), (1, 2, 3))):
            if _fits_attend(params, part, limits):
                found[_config(part, expand, past, k, heads)] = None
            if part.n <= 64 and _fits_expand(params, part, limits):
                found[_config(attend, part, past, k, heads)] = None
            if part.m <= 64 and _fits_past(params, part, limits) and _fits_side(params, part.m, k, limits):
                found[_config(attend, expand, part, k, heads)] = None
        found |= {replace(base, past_heads=count): None for count in (1, 2, 4, 8)}
    yield from found


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """New tokens are expanded once and see each other in the heads' own widths; what was there before is seen absorbed.
    Its rows, weights of heads, queries, new rows and results are moved once, scratch memory is not counted."""
    tokens, row, heads = sum(new), params.latent + params.rope, params.heads
    own = sum(n * (n + 1) // 2 for n in new)
    past = [(n, max(0, length - n)) for n, length in zip(new, lengths) if n]
    weights = heads * params.latent * (params.nope + params.value)
    flops = 2 * (tokens + sum(n for n, before in past if before)) * weights
    flops += 2 * heads * own * (params.nope + params.rope + params.value)
    flops += 2 * heads * sum(n * before for n, before in past) * (row + params.latent)
    moved = (sum(before for _, before in past) + 2 * tokens) * row + weights
    moved += tokens * heads * (params.nope + params.rope + params.value)
    return Work(flops, moved * params.dtype.itemsize)


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(4, 24, 8, 40, 20, PAGE_SIZE, torch.float32, 0.2, True, 4)
    return Case(name, replace(usual, **changes), new, lengths)


BF16 = {"dtype": torch.bfloat16, "nope": 32, "rope": 16, "latent": 64, "value": 32, "align": 16, "scale": 0.1}
V3 = {"heads": 128, "nope": 128, "rope": 64, "latent": 512, "value": 128, "dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", (1,), (1,), heads=1, nope=1, rope=1, latent=1, value=1, align=1),
    _case("edges", (63, 64, 65), (63, 64, 65), heads=2),
    _case("prompts", (70, 1, 0, 33, 17), (70, 1, 0, 33, 17), heads=3, value_rows=False),
    _case("padding", (5, 1, 3, 2), (5, 0, 2, 90)),
    _case("chunk", (19, 9, 40, 64), (150, 9, 104, 129), heads=5),
    _case("wide", (130, 66, 3), (200, 66, 131), heads=2, **BF16),
    _case("odd", (37, 5), (50, 5), heads=3, value_rows=False, dtype=torch.bfloat16),
    _case("prefill", (4096,) * 4, (4096,) * 4, **V3),
    _case("heads", (1024,), (1024,), **{**V3, "heads": 20, "nope": 192, "value": 256}),
    _case("long", (8192,), (8192,), **V3),
    _case("chunks", (2048,) * 4, (8192,) * 4, **V3),
)


def _inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands as of latent_attention, in the other form."""
    return paged_batch(case, generator) | {"form": "expanded"}


SPECS = (
    KernelSpec(
        name="latent_prefill",
        op=ops.CACHED_LATENT_ATTENTION,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=_inputs,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-6},
    ),
)
