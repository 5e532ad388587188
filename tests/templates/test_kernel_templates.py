"""Every kernel of the templates, by the same rules: goldens, names, lints, every config. Nothing is compiled here."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import random
from itertools import product
from typing import Any

import pytest
import torch

from deepinfer_compile import render
from deepinfer_compile.kernels import AnySpec, Call, Case, Limits, choices, render_kernel, render_stamp, specs
from deepinfer_compile.runtime.launch import (
    Argument,
    check_operands,
    evaluate,
    plan_from_json,
    plan_to_json,
    tensors_of,
)
from tests.golden_text import check_golden, kernel_golden
from tests.templates import source_rules

LIMITS = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32)
SMALL = Limits(("float32", "bfloat16"), "cuda", shared_bytes=96 * 1024, cores=20, max_warps=4)
SPECS = [pytest.param(spec, id=f"{spec.name}-{spec.op.name}") for spec in specs()]
CASES = [pytest.param(spec, c, id=f"{spec.op.name}-{c.name}") for spec in specs() for c in spec.cases]


def small(case: Case[Any]) -> bool:
    return sum(case.lengths) <= 1000


FEW = 60
"""Configs of a case that are always looked at, beside one for every value of every field."""

FEW_AND_ALL = pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])


def drawn(configs: list[Any], few: bool) -> list[Any]:
    """All configs, or a few."""
    if not few:
        return configs
    one: dict[Any, Any] = {}
    for config in configs:
        for field in vars(config).items():
            one.setdefault(field, config)
    more = random.Random(0).sample(configs, min(FEW, len(configs)))
    return list(dict.fromkeys([*one.values(), *more]))


def sources(spec: AnySpec, case: Case[Any], few: bool) -> list[tuple[Any, str, str]]:
    """Config, dialect and text of the sources of a case, for two targets."""
    configs = list(dict.fromkeys(c for limits in (LIMITS, SMALL) for c in spec.space(case.params, limits)))
    chosen = drawn(configs, few)
    return [(c, d, render_kernel(spec, case.params, c, d)) for c, d in product(chosen, spec.sources)]


def test_there_are_kernels_for_these_operations() -> None:
    assert {spec.op.name for spec in specs()} >= {"rms_norm", "add_rms_norm", "cached_attention", "experts", "route"}


@pytest.mark.parametrize("spec", SPECS)
def test_golden(spec: AnySpec) -> None:
    """The whole source of the first case, and how every other case differs from it."""
    texts = {
        c.name: render_kernel(spec, c.params, spec.default(c.params, LIMITS, sum(c.new)), "triton") for c in spec.cases
    }
    first = next(iter(texts))
    shown = [texts[first]]
    for name, text in texts.items():
        lines = difflib.unified_diff(texts[first].splitlines(), text.splitlines(), first, name, lineterm="", n=0)
        shown += [line for line in lines if not line.startswith("@@")]
    check_golden(kernel_golden(spec), "\n".join(shown) + "\n")


@pytest.mark.parametrize("spec", SPECS)
def test_template_names_are_the_fields_and_the_stamp(spec: AnySpec) -> None:
    fields = [f.name for cls in (spec.params, spec.config) for f in dataclasses.fields(cls)]
    assert len(fields) == len(set(fields))
    for dialect in spec.sources:
        assert render.names_of(spec.template(dialect)) == {*fields, "stamp"}


@FEW_AND_ALL
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_every_config_renders_and_keeps_the_rules(spec: AnySpec, case: Case[Any], few: bool) -> None:
    found = sources(spec, case, few)
    assert len({text for _, _, text in found}) == len(found) > 1
    for config, _, text in found:
        assert not source_rules.extents_not_powers_of_two(text)
        plan = spec.plan(case.params, config)
        made = source_rules.functions(text)
        for launch in plan.launches:
            assert [a.arg for a in made[launch.entry].args.args] == [a.name for a in launch.arguments]
            assert launch.options["num_warps"] <= LIMITS.max_warps
    for config, dialect, text in found[:: max(1, len(found) // 8)]:
        assert render_kernel(spec, case.params, config, dialect) == text
        ast.parse(text)
        assert not source_rules.loads_without_a_fill(text)
        assert not source_rules.undefined_names(text)
        assert render_stamp(text.split("\n")[0]) == text


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_defaults_are_legal_at_every_size(spec: AnySpec, case: Case[Any]) -> None:
    for limits in (LIMITS, SMALL):
        legal = set(spec.space(case.params, limits))
        for tokens in (1, 7, 64, 1000, 100_000):
            assert spec.default(case.params, limits, tokens) in legal
        ladder = (1, 8, 64, 512)
        found = choices(spec, case.params, limits, ladder)
        assert found[-1][0] is None
        assert [n for n, _ in found[:-1]] == sorted(n for n, _ in found[:-1] if n is not None)
        for tokens in ladder:
            config = next(c for upto, c in found if upto is None or tokens <= upto)
            assert config == spec.default(case.params, limits, tokens)


@pytest.mark.parametrize(("spec", "case"), [c for c in CASES if small(c.values[1])])
def test_a_call_binds_to_the_params_of_its_case(spec: AnySpec, case: Case[Any]) -> None:
    given = spec.inputs(case, torch.Generator().manual_seed(0))
    assert list(given) == [a.name for a in spec.op.overload._schema.arguments]
    phase = "verify" if getattr(case.params, "queries", 1) > 1 else "decode"
    many = getattr(case.params, "tiled", spec.name == "latent_prefill") or getattr(case.params, "rows", False)
    phase = "prefill" if many else phase
    assert spec.bind(Call(spec.op, given, phase)) == case.params
    made = spec.op.reference(*given.values())
    assert not any(t.isnan().any() for t in (made if isinstance(made, tuple) else (made,)))


@FEW_AND_ALL
@pytest.mark.parametrize(("spec", "case"), [c for c in CASES if small(c.values[1])])
def test_plans_are_data_and_fit_their_operands(spec: AnySpec, case: Case[Any], few: bool) -> None:
    given = spec.inputs(case, torch.Generator().manual_seed(0))
    tensors = tensors_of(given)
    made = spec.op.reference(*given.values())
    shapes = [t.shape for t in (made if isinstance(made, tuple) else (made,))]
    for config in drawn(list(spec.space(case.params, LIMITS)), few):
        plan = spec.plan(case.params, config)
        assert plan_from_json(plan_to_json(plan), "file") == plan
        assert {o.name for o in plan.operands} == set(tensors)
        check_operands(spec.name, plan, tensors)
        for buffer, shape in zip(plan.results, shapes):
            assert torch.Size(evaluate(e, tensors) for e in buffer.shape).numel() == shape.numel()
        memory = set(tensors) | {b.name for b in (*plan.results, *plan.scratch)}
        for argument in (a for launch in plan.launches for a in launch.arguments):
            assert _promise_holds(argument, tensors, memory)


def _promise_holds(argument: Argument, tensors: dict[str, torch.Tensor], memory: set[str]) -> bool:
    if isinstance(argument.value, str):
        return argument.value in memory
    return evaluate(argument.value, tensors) % argument.multiple == 0


@pytest.mark.parametrize("case", [c.values[1] for c in CASES if "attention" not in c.values[0].op.name])
def test_work_is_that_of_the_operation(case: Case[Any]) -> None:
    spec = next(s for s in specs() if case in s.cases)
    if small(case):
        given = spec.inputs(case, torch.Generator().manual_seed(0))
        assert spec.work(case.params, case.new, case.lengths) == spec.op.work(*given.values())


def test_work_of_attention_counts_what_is_seen() -> None:
    spec = next(s for s in specs() if s.op.name == "cached_attention")
    found = {c.name: spec.work(c.params, c.new, c.lengths) for c in spec.cases}
    whole = next(c for c in spec.cases if c.name == "block")
    given = spec.inputs(whole, torch.Generator().manual_seed(0))
    assert found["block"].flops == spec.op.work(*given.values()).flops
    # 2 heads of 1 element: a key and a value, a query and an output, new rows written and read back
    one = next(c for c in spec.cases if c.name == "one")
    assert spec.work(one.params, (0,), (9,)).flops == 0
    assert spec.work(one.params, (1,), (9,)).flops == 2 * 9 * 2
    windowed = dataclasses.replace(one.params, window=4)
    assert spec.work(windowed, (1,), (9,)).flops == 2 * 4 * 2


def test_the_rules_find_what_they_look_for() -> None:
    bad = (
        "N = tl.constexpr(3)\n"
        "\n@triton.jit\n"
        "def f(x, n):\n"
        "    a = tl.arange(0, N)\n"
        "    b = tl.zeros([4, N], tl.float32)\n"
        "    return tl.load(x + a, mask=a < n) + tl.load(x, a < n, 0.0) + b + missing\n"
    )
    assert source_rules.extents_not_powers_of_two(bad) == ["N = 3", "N = 3"]
    assert len(source_rules.loads_without_a_fill(bad)) == 2
    assert source_rules.undefined_names(bad) == ["missing"]
