"""Both forms of latent attention give eager's logits from the same cache; the choice is recorded with its reason."""

from __future__ import annotations

import pytest

from deepinfer_compile.errors import BadOption, PipelineOrder
from deepinfer_compile.facts import Fact
from deepinfer_compile.passbase import make
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.choose_latent_form import ChooseLatentForm
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.replay import logits_of, weights_from
from tests.golden_text import check_golden
from tests.passes.harness import IDS, ROWS, check_equal
from tests.passes.stages import canonical, go_on
from tests.passes.toys import check_twice_is_once, reasons

RAISED = (RaiseLatentAttention(require=True), CacheAttention())


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_forms_are_equal(name: str) -> None:
    model, before = canonical(name)
    out = []
    for form in ("absorbed", "expanded"):
        program, records = go_on(before, *RAISED, ChooseLatentForm(form))
        assert Fact.FORMS in program.facts
        assert len(records[-1].remarks) == 2
        for chunk in (None, 13, 1):
            check_equal(program, model, tol=1e-5, chunk=chunk)
        out.append(logits_of(program, weights_from(model), IDS, ROWS, 7))
    assert (out[0] - out[1]).abs().max() <= 1e-5


def test_reason_and_golden() -> None:
    program, records = go_on(canonical("deepseek_v3")[1], *RAISED, ChooseLatentForm())
    assert reasons(records, "applied") == ["absorbed: absorbed is cheaper below 48 queries a request"] * 2
    lines = [f"{r.kind} {r.graph} {r.node}: {r.reason}" for r in records[-1].remarks]
    check_golden("choose_latent_form", "\n".join(lines) + "\n")
    check_twice_is_once(program, ChooseLatentForm())


def test_kept_form_is_a_miss() -> None:
    _, records = go_on(canonical("deepseek_v2")[1], *RAISED, ChooseLatentForm("expanded"))
    assert reasons(records) == ["it is expanded already"] * 2


def test_options() -> None:
    assert make("choose-latent-form", form="expanded") == ChooseLatentForm("expanded")
    with pytest.raises(BadOption, match="absorbed"):
        ChooseLatentForm("fused")


def test_needs_caches() -> None:
    with pytest.raises(PipelineOrder, match="CACHED"):
        go_on(canonical("deepseek_v2")[1], ChooseLatentForm())
