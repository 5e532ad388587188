"""Experts become one op from every way of batching them, equal to eager; weightings that only look right are left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import to_text
from deepinfer_compile.passbase import PassContext, each_block
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_experts import RaiseExperts
from deepinfer_compile.passes.raise_router import RaiseRouter
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from deepinfer_compile.verify import verify
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import calls, check_equal
from tests.passes.toys import before_after, check_toy, check_twice_is_once, ops, raised, reasons, toy
from tests.plain_model import VOCAB, make_plain

MIXTURES = {"mixtral": 1, "gpt_oss": 2}


def raised_by_hand(program: Program, *passes: Any) -> tuple[Program, PassContext]:
    """Run passes without verifying in between: a graph may hold an op that only the last pass replaces."""
    program = program.clone()
    for p in passes:
        ctx = PassContext()
        for gm in each_block(program, ctx):
            p.run(gm, ctx)
            gm.graph.eliminate_dead_code()
            gm.recompile()
    verify(program, frozenset(program.blocks), "by hand")
    return program, ctx


def arguments(program: Program) -> set[Any]:
    """What the calls of the op say beside tensors: as capture through the experts interface would."""
    nodes = [n for gm in program.blocks.values() for n in gm.graph.nodes]
    return {tuple(n.args[7:]) for n in nodes if str(n.target) == "deepinfer.experts.default"}


@pytest.mark.parametrize("name", MIXTURES)
def test_gathered_weights(name: str) -> None:
    model = models.make(name, num_hidden_layers=2)
    program = capture(model, experts="batched_mm")
    for router in ((), (RaiseRouter(),)):
        after, ctx = raised_by_hand(program, Canonicalize(), *router, RaiseExperts())
        assert calls(after, "deepinfer.experts") == MIXTURES[name]
        assert calls(after, "aten.bmm") == 0
        assert [r.kind for r in ctx.remarks] == ["applied"] * MIXTURES[name]
        assert arguments(after) == {
            ("swiglu_oai", 1.702, 7.0, True, True) if name == "gpt_oss" else ("silu", 1.702, 7.0, False, False)
        }
        check_equal(after, model)


@pytest.mark.parametrize(("name", "dtype"), [("deepseek_v2", torch.float32), ("gpt_oss", torch.bfloat16)])
def test_grouped_rows(name: str, dtype: torch.dtype) -> None:
    model = models.make(name, dtype=dtype, num_hidden_layers=2)
    program, ctx = raised_by_hand(capture(model, experts="grouped_mm"), Canonicalize(), RaiseExperts())
    found = calls(program, "deepinfer.experts")
    assert found == len(ctx.remarks) == sum("moe" in b or "topk" in str(g.graph) for b, g in program.blocks.items())
    assert calls(program, "aten._grouped_mm") == calls(program, "transformers.grouped_mm_fallback") == 0
    check_equal(program, model, tol=2e-6 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("form", ["loop", "einsum"])
def test_plain_decoder(form: str) -> None:
    model = make_plain(form)
    program, records = raised(model, RaiseRouter(), RaiseExperts())
    assert calls(program, "deepinfer.experts") == calls(program, "deepinfer.route") == 1
    assert reasons(records) == []
    ids = torch.randint(0, VOCAB, (1, 37), generator=torch.Generator().manual_seed(3))
    for length in (1, 37):
        got = program.run({**bind(program, weights_from(model)), "input_ids": ids[:, :length]})
        want = model(ids[:, :length])
        assert (got - want).abs().max() <= 2e-6 * want.abs().max()


E, K, WIDTH, INNER = 6, 2, 24, 10


class Mixture(nn.Module):
    """Experts as modules behind a softmax router; `combine` is one of the forms below."""

    def __init__(self, combine: Any, act: Any = F.silu, bias: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.combine, self.act, self.fused = combine, act, fused
        self.gate = nn.Linear(WIDTH, E, bias=False)
        for e in range(E):
            self.add_module(f"up{e}", nn.Linear(WIDTH, INNER * (1 + fused), bias=bias))
            self.add_module(f"side{e}", nn.Linear(WIDTH, INNER, bias=bias))
            self.add_module(f"down{e}", nn.Linear(INNER, WIDTH, bias=bias))

    def expert(self, e: int, x: Tensor) -> Tensor:
        up = getattr(self, f"up{e}")(x)
        gate, up = up.chunk(2, -1) if self.fused else (up, getattr(self, f"side{e}")(x))
        return getattr(self, f"down{e}")(self.act(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, ids = self.gate(flat).softmax(-1).topk(K, -1)
        return self.combine(self, flat, weights, ids).view_as(x)


def by_sum(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    out = 0
    for e in range(E):
        out = out + (w * (ids == e)).sum(-1, keepdim=True) * m.expert(e, x)
    return out


def by_dense_matrix(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    dense = torch.zeros(x.shape[0], E).scatter(1, ids, w)
    out = torch.zeros_like(x)
    for e in reversed(range(E)):
        out += m.expert(e, x) * dense[:, e : e + 1]
    return out


def by_stack(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    every = torch.stack([m.expert(e, x) for e in range(E)], dim=1)
    dense = (F.one_hot(ids, E) * w.unsqueeze(-1)).sum(1)
    return torch.einsum("teh,te->th", every, dense)


def by_gather(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    every = torch.stack([m.expert(e, x) for e in range(E)], dim=-2)
    chosen = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, WIDTH))
    return (chosen * w.unsqueeze(-1)).sum(1)


def with_shared(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    out = x * 2.0
    for e in range(E):
        out = out + (w * (ids == e)).sum(-1, keepdim=True) * m.expert(e, x)
    return out + x.tanh()


FORMS = [by_sum, by_dense_matrix, by_stack, by_gather, with_shared]


@pytest.mark.parametrize(("combine", "router"), [*((form, False) for form in FORMS), (by_sum, True), (by_stack, True)])
def test_module_forms(combine: Any, router: bool) -> None:
    model = toy(Mixture(combine))
    program, records = raised(model, *([RaiseRouter()] if router else []), RaiseExperts())
    assert ops(program) == ["deepinfer.route"] * router + ["deepinfer.experts"]
    assert reasons(records, "applied") == [
        "every expert on every token, 6 experts, silu; derived weights: stacks of 6 modules"
    ]
    check_toy(program, model, tol=2e-6)


@pytest.mark.parametrize(
    ("act", "kind"),
    [(F.silu, "silu"), (F.gelu, "gelu"), (lambda g: F.gelu(g, approximate="tanh"), "gelu_tanh"), (F.relu, "relu")],
)
@pytest.mark.parametrize("fused", [False, True])
def test_activations_and_biases(act: Any, kind: str, fused: bool) -> None:
    model = toy(Mixture(by_sum, act, bias=True, fused=fused))
    program, records = raised(model, RaiseExperts())
    assert f"6 experts, {kind};" in reasons(records, "applied")[0]
    check_toy(program, model, tol=2e-6)


class Stacked(nn.Module):
    """Experts as stacked weights, batched over all experts."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gate = nn.Linear(WIDTH, E, bias=False)
        self.w13 = nn.Parameter(torch.empty(E, WIDTH, 2 * INNER))
        self.w2 = nn.Parameter(torch.empty(E, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, ids = self.gate(flat).softmax(-1).topk(K, -1)
        dense = torch.zeros(flat.shape[0], E).scatter(1, ids, weights)
        if self.form == "dropped":
            dense = dense * (dense.cumsum(0) < 3.0)
        elif self.form == "soft":
            dense = self.gate(flat).softmax(-1)
        elif self.form == "squared":
            dense = dense * dense
        if self.form == "dispatched":
            h = torch.einsum("eth,ehi->eti", torch.einsum("te,th->eth", dense.ne(0).float(), flat), self.w13)
        elif self.form == "expanded":
            h = torch.bmm(flat.unsqueeze(0).expand(E, -1, -1), self.w13)
        elif self.form == "repeated":
            h = torch.bmm(flat.unsqueeze(0).repeat(E, 1, 1), self.w13)
        else:
            h = torch.matmul(flat, self.w13)
        gate, up = h.chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.w2)
        return (y * dense.t().unsqueeze(-1)).sum(0).view_as(x)


@pytest.mark.parametrize("form", ["expanded", "repeated", "broadcast"])
def test_batched_forms(form: str) -> None:
    model = toy(Stacked(form))
    program, records = raised(model, RaiseExperts())
    assert reasons(records, "applied") == ["every expert on every token, 6 experts, silu"]
    assert ops(program) == ["deepinfer.experts"]
    check_toy(program, model, tol=2e-6)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("soft", "no top-k choice of experts is behind it, every token reaches every expert"),
        ("dropped", "the combination of the experts is not the chosen experts' weighted sum"),
        ("dispatched", "the experts see a dispatched selection of the tokens, not all of them"),
    ],
)
def test_near_misses_of_batches(form: str, reason: str) -> None:
    model = toy(Stacked(form))
    program, records = raised(model, RaiseExperts())
    assert ops(program) == []
    assert reasons(records) == [reason]
    check_toy(program, model)


def twice_the_first(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + (w * (ids == max(e, 1))).sum(-1, keepdim=True) * m.expert(e, x)
    return out


def biased_weights(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + ((w * (ids == e)).sum(-1, keepdim=True) + 0.125) * m.expert(e, x)
    return out


def read_between(m: Mixture, x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        out = out + (w * (ids == e)).sum(-1, keepdim=True) * m.expert(e, x)
        out = out + out.mean() if e == 3 else out
    return out


@pytest.mark.parametrize(
    ("combine", "options", "reason"),
    [
        (twice_the_first, {}, "the factors of the 6 experts are not their weights in a choice among them"),
        (biased_weights, {}, "the factors of the 6 experts are not their weights in a choice among them"),
        (read_between, {}, "the experts' outputs are not summed up term by term"),
        (by_sum, {"act": torch.sin}, "the activation before mul_tensor"),
    ],
)
def test_near_misses_of_modules(combine: Any, options: dict[str, Any], reason: str) -> None:
    model = toy(Mixture(combine, **options))
    program, records = raised(model, RaiseExperts())
    assert ops(program) == []
    assert reasons(records)
    assert all(r.startswith(reason) for r in reasons(records))
    check_toy(program, model)


def test_dense_layers_are_no_candidates() -> None:
    program, records = raised(models.make("llama"), RaiseExperts())
    assert records[-1].remarks == ()
    assert calls(program, "deepinfer.experts") == 0


def test_a_capped_pass_leaves_the_graph() -> None:
    model = toy(Mixture(by_sum))
    program, _ = Pipeline((Canonicalize(), RaiseExperts())).run(capture(model), limits={"raise-experts": 0})
    assert ops(program) == []
    check_toy(program, model)


def test_twice_is_once() -> None:
    program, _ = raised(toy(Mixture(by_stack)), RaiseRouter(), RaiseExperts())
    check_twice_is_once(program, RaiseExperts())


def test_golden() -> None:
    check_golden("raise_experts", before_after(toy(Stacked("expanded")), RaiseRouter(), RaiseExperts()))


class AtOnce(nn.Module):
    """Inner values weighted by a matrix of shares; one product sums over their elements and over the experts."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gate = nn.Linear(WIDTH, E, bias=False)
        self.w13 = nn.Parameter(torch.empty(E, 2 * INNER, WIDTH))
        self.w2 = nn.Parameter(torch.empty(E, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, ids = self.gate(flat).softmax(-1).topk(K, -1)
        share = torch.zeros(flat.shape[0], E, dtype=x.dtype).scatter(1, ids, weights)
        if self.form == "soft":
            share = self.gate(flat).softmax(-1)
        elif self.form == "shifted":
            share = share.roll(1, 1)
        gate, up = torch.einsum("nd,eid->nei", flat, self.w13).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).float() * share.float().unsqueeze(-1)
        return torch.einsum("nei,edi->nd", inner, self.w2.float()).type_as(x).view_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_over_elements_and_experts(dtype: torch.dtype) -> None:
    model = toy(AtOnce("chosen"), dtype=dtype)
    program, records = raised(model, RaiseExperts())
    assert ops(program) == ["deepinfer.experts"]
    assert reasons(records) == []
    check_toy(program, model, tol=2e-6 if dtype == torch.float32 else 2e-2)
    check_twice_is_once(program, RaiseExperts())


@pytest.mark.parametrize(("form", "reason"), [("soft", "no top-k choice"), ("shifted", "not the chosen experts'")])
def test_other_shares_of_one_product_stay_as_they_are(form: str, reason: str) -> None:
    model = toy(AtOnce(form))
    (before, _), (after, records) = raised(model), raised(model, RaiseExperts())
    assert [reason in r for r in reasons(records)] == [True]
    texts = [{name: to_text(gm) for name, gm in p.blocks.items()} for p in (before, after)]
    assert texts[0] == texts[1]
