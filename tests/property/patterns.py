"""Constructs that the raising passes know, and near misses of them, as lines of random programs.

The spellings are those of the pass tests; what differs here is everything around them. `finds` is what a program for
torch.compile must hold afterwards, `missed` a part of the reason that some pass must give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.passes import test_raise_activation as acts
from tests.passes import test_raise_attention as attentions
from tests.passes import test_raise_experts as experts
from tests.passes import test_raise_rms_norm as norms
from tests.passes import test_raise_rope as ropes
from tests.passes import test_raise_router as routers
from tests.property import cached
from tests.property.programs import NAMES, Size

Operand = tuple[str, tuple[Size, ...], torch.dtype, str, int]
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Pattern:
    """One line. text: over the operands, `call` (as known[name]) and `module`. exact: every bit is kept."""

    name: str
    operands: tuple[Operand, ...]
    text: str
    finds: dict[str, int]
    missed: str = ""
    call: Callable[..., Any] | None = None
    module: str = ""
    gives: int = 1

    @property
    def near(self) -> bool:
        """Whether it is a near miss."""
        return bool(self.missed)


def _input(name: str, *shape: Size, dtype: torch.dtype = F32, kind: str = "input", below: int = 3) -> Operand:
    return name, shape, dtype, kind, below


def _norms() -> list[Pattern]:
    found = []
    for dtype, said in ((F32, "f32"), (BF16, "bf16")):
        operands = (_input("x", "b", "t", 10, dtype=dtype), _input("w", 10, dtype=dtype, kind="parameter"))
        for f in (*norms.SPELLINGS, norms.divided, norms.reciprocal, norms.power):
            name = f"{said} norm {f.__name__}"
            finds = {"rms_norm": 2 if f is norms.middle_used else 1}
            found.append(Pattern(name, operands, f"known[{name!r}]({{x}}, {{w}})", finds, call=f))
    for miss, (f, reason) in norms.MISSES.items():
        name = f"norm miss: {miss}"
        shape: tuple[Size, ...] = ("b", 3, 10) if miss == "two dims" else ("b", "t", 10)
        operands = (_input("x", *shape), _input("w", 10, kind="parameter"))
        found.append(Pattern(name, operands, f"known[{name!r}]({{x}}, {{w}})", {}, reason.split("[")[0], f))
    name = "norm miss: half precision mean"
    operands = (_input("x", "b", "t", 10, dtype=BF16), _input("w", 10, dtype=BF16, kind="parameter"))
    text = f"known[{name!r}]({{x}}, {{w}})"
    found.append(Pattern(name, operands, text, {}, "in half precision", lambda x, w: x * norms.root(x) * w))
    return found


def _ropes() -> list[Pattern]:
    found = []
    tables = (_input("c", "t", 4), _input("s", "t", 4))
    for dtype, said in ((F32, "f32"), (BF16, "bf16")):
        operands = (_input("x", "b", 3, "t", 8, dtype=dtype), *tables)
        for f in ropes.SPELLINGS:
            name = f"{said} rope {f.__name__}"
            found.append(Pattern(name, operands, f"known[{name!r}]({{x}}, {{c}}, {{s}})", {"rope": 1}, call=f))
    for miss, (f, reason) in ropes.MISSES.items():
        name = f"rope miss: {miss}"
        operands = (_input("x", "b", 3, "t", 8), *tables)
        found.append(Pattern(name, operands, f"known[{name!r}]({{x}}, {{c}}, {{s}})", {}, reason, f))
    both = (_input("x", "b", 3, 4, 8),)
    for name, text, finds, missed in (
        ("rope complex", "{module}({x})", {"rope": 1, "complex_rope_table": 1}, ""),
        ("rope miss: conjugated", "{module}({x}, backwards=True)", {}, "the table is conjugated"),
    ):
        found.append(Pattern(name, both, text, finds, missed, module="cached.Complex(3)"))
    return found


def _acts() -> list[Pattern]:
    found = []
    for dtype, said in ((F32, "f32"), (BF16, "bf16")):
        operands = (_input("g", "b", "t", 6, dtype=dtype), _input("u", "b", "t", 6, dtype=dtype))
        for i, (f, kind, *_) in enumerate(acts.KINDS):
            name = f"{said} act {i} {kind}"
            found.append(Pattern(name, operands, f"known[{name!r}]({{g}}, {{u}})", {"gated_act": 1}, call=f))
    for miss, (f, reason) in acts.MISSES.items():
        name = f"act miss: {miss}"
        operands = (_input("g", "b", "t", 6), _input("u", "b", "t", 6))
        found.append(Pattern(name, operands, f"known[{name!r}]({{g}}, {{u}})", {}, reason, f))
    return found


def _routers() -> list[Pattern]:
    found = []
    operands = (
        *(_input("x", "t", 24), _input("w", 8, 24, kind="parameter"), _input("e", 8, kind="parameter")),
        _input("i", 11, 2, dtype=torch.int64, kind="buffer", below=8),
    )
    plain = (cached.any_order, routers.llama4_router, routers.learned_scale, routers.late_scale)
    for f in (*plain, routers.shared_values, cached.normalised, cached.grouped, cached.chosen_softmax):
        name = f"router {f.__name__}"
        text = f"known[{name!r}](F.linear({{x}}, {{w}}), {{e}}, {{i}})"
        found.append(Pattern(name, operands, text, {"route": 1}, call=f, gives=2))
    for f, reason in (
        (routers.hashed, "looked up in a table"),
        (routers.raw_logits, "their chosen values meet no softmax"),
        (routers.two_readers, "the chosen scores are read in two ways"),
        (routers.biased_values, "the biased scores serve as weights"),
        (routers.other_slope, "the softplus has another slope"),
        (cached.grouped_filled_with_zero, "which can beat a real score"),
        (cached.grouped_biased_weights, "other scores than the unbiased ones"),
        (cached.doubles, "the logits are f64"),
        (cached.over_tokens, "the softmax does not run over the experts"),
    ):
        name = f"router miss: {f.__name__}"
        text = f"known[{name!r}](F.linear({{x}}, {{w}}), {{e}}, {{i}})"
        found.append(Pattern(name, operands, text, {}, reason, f, gives=2))
    return found


def _experts() -> list[Pattern]:
    x, found = (_input("x", 1, "t", 24),), []
    for f in experts.FORMS:
        module = f"filled(experts.Mixture(experts.{f.__name__}))"
        found.append(Pattern(f"experts {f.__name__}", x, "{module}({x})", {"route": 1, "experts": 1}, module=module))
    for form in ("expanded", "repeated", "broadcast"):
        module = f"filled(experts.Stacked({form!r}))"
        found.append(Pattern(f"experts {form}", x, "{module}({x})", {"route": 1, "experts": 1}, module=module))
    for form, cast, dtype in (
        ("gathered", "", F32),
        ("gathered", ".bfloat16()", BF16),
        ("grouped", ".bfloat16()", BF16),
    ):
        module, rows = f"filled(cached.Rows({form!r})){cast}", (_input("x", "b", "t", 24, dtype=dtype),)
        name = f"experts {form}{cast}"
        found.append(Pattern(name, rows, "{module}({x})", {"route": 1, "experts": 1}, module=module))
    left = {"route": 1, "gated_act": experts.E}
    for f, finds, reason in (
        (experts.twice_the_first, left, "are not their weights in a choice among them"),
        (experts.biased_weights, left, "are not their weights in a choice among them"),
        (experts.read_between, left, "the experts' outputs are not summed up term by term"),
    ):
        module = f"filled(experts.Mixture(experts.{f.__name__}))"
        found.append(Pattern(f"experts miss: {f.__name__}", x, "{module}({x})", finds, reason, module=module))
    for form, finds, reason in (
        ("soft", {"gated_act": 1}, "no top-k choice of experts is behind it"),
        ("dropped", {"route": 1, "gated_act": 1}, "not the chosen experts' weighted sum"),
        ("dispatched", {"route": 1, "gated_act": 1}, "the experts see a dispatched selection"),
    ):
        module = f"filled(experts.Stacked({form!r}))"
        found.append(Pattern(f"experts miss: {form}", x, "{module}({x})", finds, reason, module=module))
    return found


def _attentions() -> list[Pattern]:
    x, found = (_input("x", "b", "t", 24),), []
    forms = "sdpa_flag sdpa_grouped sdpa_both_ways sdpa_additive sdpa_no_mask einsum alibi by_content reversed_mask"
    for form in forms.split():
        module = f"filled(attentions.Attend(attentions.{form}))"
        found.append(Pattern(f"attention {form}", x, "{module}({x})", {"attention": 1}, module=module))
    hidden = "a row that sees no key would be 0"
    for form, reason in (
        ("eager", hidden),
        ("eager_scaled_late", hidden),
        ("sinks", hidden),
        ("weights_read", "the attention weights are read by something other"),
        ("mask_before_cap", "the mask is applied before the scale or the softcap"),
        ("small_fill", "hidden scores are filled with -2.0"),
        ("odd_cap", "the softcap divides and multiplies by different numbers"),
        ("powered", "aten.abs stands between the scores and their softmax"),
    ):
        module = f"filled(attentions.Attend(attentions.{form}))"
        read = (_input("x", 1, "t", 24),) if form == "sinks" else x
        found.append(Pattern(f"attention miss: {form}", read, "{module}({x})", {}, reason, module=module))
    return found


def _latents() -> list[Pattern]:
    x = (_input("x", 2, 1, 24), _input("at", 1, dtype=torch.int64, below=cached.KEYS))
    text, found = "{module}({x}, {at})", []
    for options in ("", "key='writes'", "layout='slices'"):
        module = f"filled(cached.Cached({options}))"
        finds = {"latent_attention": 1}
        found.append(Pattern(f"latent {options}", x, text, finds, module=module))
    for options, reason in (
        ("bias=True", "the up-projection of the latent has a bias"),
        ("key='sum'", "not two parts side by side"),
        ("key='shifted'", "is not a head's part of an up-projection"),
    ):
        module = f"filled(cached.Cached({options}))"
        found.append(Pattern(f"latent miss: {options}", x, text, {"attention": 1}, reason, module=module))
    module = "filled(cached.Cached())"
    many = (_input("x", 2, 32, 24), _input("at", 1, dtype=torch.int64, below=1))
    reason = "expanding the latent costs less"
    found.append(Pattern("latent miss: many queries", many, text, {"attention": 1}, reason, module=module))
    return found


NAMES.update({"experts": experts, "attentions": attentions, "cached": cached})
PATTERNS: tuple[Pattern, ...] = (
    *(*_norms(), *_ropes(), *_acts(), *_routers()),
    *(*_experts(), *_attentions(), *_latents()),
)
