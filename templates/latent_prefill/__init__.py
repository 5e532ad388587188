"""Latent attention of prompts in the expanded form, with what a prompt's earlier part left in the cache.

Absorbed, a pair of tokens costs two products over the latent row; expanded, two over a head's own widths, a third of
that or less, for one up-projection of each new token. So the new tokens attend to each other through keys and values in
scratch memory, two rows a token and head. Tokens that are in the cache already (a chunk after the first, a kept prefix)
are read as they lie, absorbed: expanding them would take memory that nobody can size without asking the device. The two
parts meet by their log-sum-exp. Without earlier tokens the second part is a launch whose programs end at once, several
heads a program so that there are few of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.templates import latent_attention
from deepinfer_compile.templates.latent_attention.batch import paged_batch
from deepinfer_compile.templates.latent_prefill.arguments import SMALLEST_TILE, plan, tile
from deepinfer_compile.templates.latent_prefill.params import Config, Params

ACCUMULATORS = 128
"""fp32 sums that a thread keeps in registers."""
FEWEST_WARPS = 4
"""What the matrix units take together; more than one for 16 x 16 elements of a tile repeat each other's work."""
MOST_HEADS = 8
"""Heads of a program of look_back."""
LADDER = (1, 64, 512, 2048, 8192)
"""Numbers of tokens whose defaults `space` varies."""


class Attend(NamedTuple):
    """The part of a Config that attend has: new tokens, keys at a time."""

    m: int
    n: int
    warps: int
    stages: int


class Expand(NamedTuple):
    """The part of a Config that expand has: tokens, latent elements at a time."""

    m: int
    k: int
    warps: int
    stages: int


class Past(NamedTuple):
    """The part of a Config that look_back has: new tokens, cached rows and elements of weights at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


ATTEND = (Attend(128, 128, 8, 2), Attend(128, 64, 8, 3), Attend(128, 64, 8, 2), Attend(128, 32, 8, 2))
ATTEND += (Attend(64, 64, 4, 2), Attend(64, 32, 4, 2), Attend(32, 32, 4, 2), Attend(16, 16, 4, 1))
EXPAND = (Expand(128, 64, 8, 3), Expand(128, 32, 8, 3), Expand(64, 64, 4, 3), Expand(64, 32, 8, 2), Expand(32, 32, 4, 2))
EXPAND += (Expand(16, 16, 4, 1),)
PAST = (Past(64, 64, 64, 8, 2), Past(64, 32, 64, 8, 2), Past(64, 32, 32, 4, 2), Past(32, 32, 32, 4, 2))
PAST += (Past(16, 32, 32, 4, 2), Past(16, 16, 16, 4, 1))
"""Best first; the first that is legal is taken. fp32, which the matrix units cannot do, begins further down: a larger
tile is unrolled into more code than registers hold."""
EXACT = 32
"""Rows of a tile of fp32 at most."""


def bind(call: Call) -> Params | Refused:
    """Params of a call of cached_latent_attention."""
    if not latent_attention.is_expanded(call):
        return Refused("it computes the expanded form of a prefill, of heads that fit its tiles")
    found = latent_attention.bind_operands(call)
    if isinstance(found, Refused):
        return found
    kept = ("heads", "nope", "rope", "latent", "value", "page", "dtype", "scale", "value_rows", "align")
    return Params(**{name: getattr(found, name) for name in kept})


def _fits_attend(params: Params, part: Attend, limits: Limits) -> bool:
    """The query tile and keys and values in flight on chip, scores and sums in registers."""
    query, value = tile(params.nope) + tile(params.rope), tile(params.value)
    weights = part.n if part.m < 64 else 0
    elements = part.m * (query + weights) + part.stages * part.n * (query + value)
    return (
        elements * params.dtype.itemsize <= limits.shared_bytes
        and part.m * (part.n + value) <= ACCUMULATORS * 32 * part.warps
        and part.warps <= min(limits.max_warps, max(FEWEST_WARPS, part.m * part.n // SMALLEST_TILE**2))
    )


def _fits_expand(params: Params, part: Expand, limits: Limits) -> bool:
    width = tile(params.nope) + tile(params.value)
    flying = part.stages * part.k * (part.m + width) * params.dtype.itemsize
    # the sums pass through shared memory once, on their way out
    out = part.m * max(tile(params.nope), tile(params.value)) * torch.float32.itemsize
    return (
        max(flying, out) <= limits.shared_bytes
        and part.k <= tile(params.latent)
        and part.m * width <= ACCUMULATORS * 32 * part.warps
        and part.warps <= min(limits.max_warps, max(FEWEST_WARPS, part.m * width // SMALLEST_TILE**2))
    )


def _fits_past(params: Params, part: Past, limits: Limits) -> bool:
    latent, rope = tile(params.latent), tile(params.rope)
    flying = part.stages * part.n * (latent + rope) + part.m * (latent + rope + part.n)
    weights = part.stages * part.k * (latent + part.m) + part.m * latent
    return (
        max(flying, weights) * params.dtype.itemsize <= limits.shared_bytes
        and params.page % part.n == 0
        and part.k <= max(tile(params.nope), tile(params.value))
        and part.m * max(latent, part.n) <= ACCUMULATORS * 32 * part.warps
        and part.warps <= min(limits.max_warps, max(FEWEST_WARPS, part.m * part.n // SMALLEST_TILE**2))
    )


def _parts(config: Config) -> tuple[Attend, Expand, Past]:
    one = Attend(config.block_m, config.block_n, config.num_warps, config.num_stages)
    two = Expand(config.expand_m, config.expand_k, config.expand_warps, config.expand_stages)
    return one, two, Past(config.past_m, config.past_n, config.past_k, config.past_warps, config.past_stages)


def _config(attend: Attend, expand: Expand, past: Past, heads: int) -> Config:
    return Config(*attend, *expand, *past[:3], heads, *past[3:])


def _allowed(params: Params, part: Any, most: int) -> bool:
    return bool(part.m <= (min(most, EXACT) if params.dtype == torch.float32 else most))


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Large tiles, smaller ones where they would leave cores idle; heads of a program of look_back as cores allow."""
    most = 128 if tokens > 64 and -(-tokens // 128) * params.heads >= limits.cores else 64
    found: list[Any] = []
    for parts, fits in ((ATTEND, _fits_attend), (EXPAND, _fits_expand), (PAST, _fits_past)):
        narrow = [p._replace(warps=min(p.warps, limits.max_warps)) for p in parts if _allowed(params, p, most)]
        legal = [p for p in narrow if fits(params, p, limits)]
        if not legal:
            raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")
        found.append(legal[0])
    heads = MOST_HEADS
    while heads > 1 and -(-tokens // found[2].m) * -(-params.heads // heads) < 4 * limits.cores:
        heads //= 2
    return _config(*found, heads)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """The defaults, then each launch's part varied beside the others' default."""
    bases = dict.fromkeys(default(params, limits, tokens) for tokens in LADDER)
    found = dict(bases)
    exact = params.dtype == torch.float32
    sizes = (16, 32) if exact else (16, 32, 64, 128)
    for base in bases:
        attend, expand, past = _parts(base)
        for m, n, warps, stages in product(sizes, sizes, (4, 8), (1, 2, 3)):
            if _fits_attend(params, one := Attend(m, n, warps, stages), limits):
                found[_config(one, expand, past, base.past_heads)] = None
        for m, k, warps, stages in product(sizes, (16, 32) if exact else (32, 64), (4, 8), (1, 2, 3, 4)):
            if _fits_expand(params, two := Expand(m, k, warps, stages), limits):
                found[_config(attend, two, past, base.past_heads)] = None
        for m, n, k, warps, stages in product(sizes, sizes, (16, 32) if exact else (32, 64), (4, 8), (1, 2)):
            if _fits_past(params, three := Past(m, n, k, warps, stages), limits):
                found[_config(attend, expand, three, base.past_heads)] = None
        found |= {replace(base, past_heads=heads): None for heads in (1, 2, 4, 8)}
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
    _case("prefill", (4096,) * 4, (4096,) * 4, **V3),
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
