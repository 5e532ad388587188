"""Attention over keys that another layer wrote: the launches of `paged_attention` without its write.

What it computes, its tiles and its configurations are those of `paged_attention`, whose template it includes. Where
the queries are chosen rows of a longer step each is a request of its own, as in decoding, and the number of tokens of
the step says nothing of how many there are; so a config is taken that also fills the target with few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused, fields_of, pointer
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.launch import Expr, Launch, LaunchPlan
from deepinfer_compile.templates import paged_attention as paged
from deepinfer_compile.templates.paged_attention import Config
from deepinfer_compile.templates.paged_attention.batch import paged_batch
from deepinfer_compile.templates.shared_attention import write

FEW = 16
"""Chosen rows of a step that a config is made for."""


@dataclass(frozen=True)
class Params(paged.Params):
    """rows: the queries are chosen rows of a longer step, each a request of its own."""

    rows: bool = False


def _attending(params: Params) -> paged.Params:
    return paged.Params(**{k: v for k, v in fields_of(params).items() if k != "rows"})


def bind(call: Call) -> Params | Refused:
    """Params of a call of shared_attention."""
    given = dict(call.arguments)
    q, kv = given["q"], given["kv"]
    if kv.shape[4] != max(q.shape[2], given["value_width"]):
        return Refused(f"a cache of rows of {kv.shape[4]} elements")
    # what it would be called with if it wrote: the keys and values lie in the cache as the kernel wants them
    given["k"] = kv.new_empty(q.shape[0], kv.shape[3], q.shape[2])
    given["v"] = kv.new_empty(q.shape[0], kv.shape[3], given["value_width"])
    rows = call.phase not in paged.QUERIES and statically_known_true(given["seq_len"].shape[0] == q.shape[0])
    found = paged.bind(replace(call, arguments=given, phase="decode" if rows else call.phase))
    return found if isinstance(found, Refused) else Params(**fields_of(found), rows=rows)


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """That of paged attention, for few tokens where they are chosen ones."""
    return paged.default(params, limits, min(tokens, FEW) if params.rows else tokens)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    yield from paged.space(params, limits)


def plan(params: Params, config: Config) -> LaunchPlan:
    """Attend, and merge where there are pieces; the rows are written."""
    whole = paged.plan(_attending(params), config)
    tokens: Expr = ("size", "q", 0)
    cleared = (pointer("slot", torch.int64, 1), pointer("out", params.dtype))
    launches = (Launch("clear", (tokens,), cleared, {"num_warps": 1}), *whole.launches[1:])
    operands = tuple(o for o in whole.operands if o.name not in ("k", "v"))
    return replace(whole, operands=operands, launches=launches)


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """That of paged attention without new rows."""
    found = paged.work(params, new, lengths)
    rows = 2 * sum(new) * params.kv_heads * (params.key_width + params.value_width) * params.dtype.itemsize
    return Work(found.flops, found.bytes - rows)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of a case: of a batch whose keys are written."""
    given = paged_batch(Case(case.name, case.params, case.new, case.lengths), generator)
    k, v = given.pop("k"), given.pop("v")
    ops.WRITE_KV.reference(k, v, given["kv"], given["slot"])
    return {**given, "value_width": case.params.value_width}


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(8, 2, 64, 64, PAGE_SIZE, torch.bfloat16, 0.125, 0, 0.0, False, 1, False, 16)
    return Case(name, replace(usual, **changes), new, lengths)


F32 = {"dtype": torch.float32}
NARROW = {"key_width": 20, "value_width": 20, "scale": 20**-0.5, "align": 4}
CASES = (
    _case("one", (1,), (1,), heads=1, kv_heads=1, key_width=1, value_width=1, align=1, **F32),
    _case("rows", (1, 1, 1), (127, 128, 300), rows=True, **NARROW, **F32),
    _case("empty", (1, 1, 1, 1), (130, 0, 64, 1), heads=6),
    _case("window", (1, 0, 1), (300, 0, 20), window=100, sinks=True, softcap=5.0, heads=12, **NARROW),
    _case("verify", (3, 1, 8, 11), (3, 64, 70, 130), queries=8, heads=14, key_width=96, value_width=80, **F32),
    _case("prompts", (70, 1, 0, 33), (100, 1, 65, 33), queries=32, tiled=True, **NARROW, **F32),
    _case("typical", (1,) * 64, (4096,) * 64, heads=32, kv_heads=8, key_width=128, value_width=128),
    _case("largest", (1,) * 4, (65536,) * 4, rows=True, heads=64, kv_heads=8, key_width=128, value_width=128),
)

SPECS = (
    KernelSpec(
        name="shared_attention",
        op=ops.SHARED_ATTENTION,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=inputs,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-7},
    ),
    write.SPEC,
)
