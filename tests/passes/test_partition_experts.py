"""Experts spread over ranks, which are threads here: every rank gets what the model gives; what else must hold."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.bundle import DictSource, execute
from deepinfer_compile.capture import capture
from deepinfer_compile.eplb.layout import in_order
from deepinfer_compile.errors import BadOption, NotRowwise, UnsupportedConstruct
from deepinfer_compile.graph import is_op, target_name, to_text
from deepinfer_compile.ops import COMBINE, DISPATCH, EXPERTS
from deepinfer_compile.ops.parallel import joined
from deepinfer_compile.passes.partition_experts import PartitionExperts
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.programjson import program_from_json, program_to_json
from deepinfer_compile.replay import _Batch, weights_from
from deepinfer_compile.rowwise import analyse
from deepinfer_compile.settings import ExpertPlan
from tests.passes.stages import go_on
from tests.plain_model import VOCAB, Expert, LoopExperts, PlainDecoder, make_plain
from tests.ranks import Together, in_threads

TOKENS, LAST = 23, (0, 11, 22)


class Shared(LoopExperts):
    """Experts beside one that every token uses."""

    def __init__(self, count: int = 5) -> None:
        super().__init__(44, 28, count, 2)
        self.shared = Expert(44, 20)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x)


def with_shared(*counts: int) -> PlainDecoder:
    model = make_plain("loop", layers=len(counts))
    for layer, count in zip(model.layers, counts):
        layer.ffn = Shared(count)
    return model.eval()


@functools.cache
def packed(form: str) -> tuple[nn.Module, Program]:
    """A model and its program with caches."""
    model = with_shared(5, 5) if form == "shared" else make_plain(form, layers=2)
    return model, default().run(capture(model))[0]


def spread(form: str, ranks: int, slots: int | None = None, how: str = "exact", **options: Any) -> Program:
    settings = {"experts": ExpertPlan(ranks, slots)}
    return go_on(packed(form)[1], PartitionExperts(form=how), settings=settings, **options)[0]  # type: ignore[arg-type]


def arguments(program: Program, model: nn.Module, rank: int, tokens: int) -> dict[str, Tensor]:
    """Weights of a rank's slots, the others', and the tables."""
    sizes = program.info["experts"]
    plan = in_order(sizes["layers"], sizes["experts"], sizes["slots"], sizes["ranks"])
    source = weights_from(model)
    width = min(sizes["chosen"], sizes["room"])
    found = {
        "expert_offsets": torch.arange(sizes["ranks"] + 1) * sizes["room"],
        "expert_rank": torch.tensor([rank]),
        "lanes": torch.empty(sizes["ranks"] * tokens * width, dtype=torch.uint8),
    }
    for layer in range(sizes["layers"]):
        found[f"expert_slots_{layer}"] = torch.from_numpy(plan.log2phy[layer])
        found[f"expert_counts_{layer}"] = torch.from_numpy(plan.logcnt[layer])
    for name, ref in program.weights.items():
        held = ref.value if ref.value is not None else source.get(ref.name)
        if held is None:
            assert ref.recipe is not None
            held = execute(ref.recipe, DictSource(source))
        if ref.experts is not None:
            assert tuple(held.shape) == ref.whole
            slots = plan.phy2log[ref.experts[0]].reshape(sizes["ranks"], -1)[rank].tolist()
            held = torch.stack([held[e] if e >= 0 else torch.full_like(held[0], float("nan")) for e in slots])
        found[name] = held
    return found


@pytest.mark.parametrize("how", ["exact", "static"])
@pytest.mark.parametrize(
    ("form", "ranks", "slots"), [("loop", 2, None), ("einsum", 3, 8), ("shared", 4, 5), ("loop", 1, None)]
)
def test_every_rank_gets_what_the_model_gives(form: str, ranks: int, slots: int | None, how: str) -> None:
    model, program = packed(form)[0], spread(form, ranks, slots, how)

    def work(peers: Together) -> float:
        tokens = TOKENS - peers.rank
        ids = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(peers.rank)).tolist()
        rows = [r - peers.rank for r in LAST[1:]]
        batch = _Batch(program, ids, tokens)
        given = batch.step(rows)
        # the batch of a replay also has requests of others around the sequence
        most = given["input_ids"].shape[1] + peers.rank
        with joined(peers):
            got = program.run({**arguments(program, model, peers.rank, most), **batch.caches, **given})
        with torch.no_grad():
            want = model(torch.tensor([ids]))[0, rows]
        assert got[: len(rows)].shape == want.shape
        return float((got[: len(rows)] - want).abs().max() / want.abs().max())

    assert max(in_threads(ranks, work)) < 1e-5


def test_the_shared_expert_runs_while_rows_travel() -> None:
    program = spread("shared", 2)
    calls = [str(c.target).removeprefix("layer0_") for c in program.calls() if c.meta.get("layer") == 1]
    assert calls == ["before", "dispatch", "beside", "experts", "combine", "after"]
    beside = [target_name(n) for n in program.blocks["layer0_beside"].graph.nodes if n.op == "call_function"]
    assert beside.count("aten.linear") == 3
    for name, op in (("dispatch", DISPATCH), ("combine", COMBINE), ("experts", EXPERTS)):
        assert sum(is_op(n, op.overload) for n in program.blocks[f"layer0_{name}"].graph.nodes) == 1
    analyse(program)


def test_weights_are_those_of_slots_and_have_recipes() -> None:
    program = spread("loop", 3, 7)
    held = {n: r for n, r in program.weights.items() if r.experts is not None}
    assert sorted(held) == ["expert_w13_0", "expert_w13_1", "expert_w2_0", "expert_w2_1"]
    ref = held["expert_w13_1"]
    assert (ref.shape, ref.whole, ref.experts) == ((3, 56, 44), (5, 56, 44), (1, 5))
    assert {p.name for p in ref.parts} == {f"layers.1.ffn.experts.{e}.w{i}.weight" for e in range(5) for i in (1, 3)}
    assert not any("experts" in r.name for n, r in program.weights.items() if n not in held)
    assert program.info["experts"] == {
        "ranks": 3, "slots": 7, "room": 3, "experts": 5, "layers": 2, "chosen": 2,
    }  # fmt: skip


def test_it_survives_being_stored() -> None:
    program = spread("einsum", 2, how="static")
    again = program_from_json(program_to_json(program))
    assert {n: to_text(g) for n, g in again.graphs()} == {n: to_text(g) for n, g in program.graphs()}
    assert {n: (r.name, r.shape, r.experts) for n, r in again.weights.items()} == {
        n: (r.name, r.shape, r.experts) for n, r in program.weights.items()
    }


def test_what_is_left_alone() -> None:
    """Without the setting, and what bisection does not allow."""
    program = packed("loop")[1]
    for settings, limits in (({}, None), ({"experts": ExpertPlan(2)}, {"partition-experts": 0})):
        after, _ = go_on(program, PartitionExperts(), settings=settings, limits=limits)
        assert not any(n.target == DISPATCH.overload for gm in after.blocks.values() for n in gm.graph.nodes)
        assert to_text(after.blocks["layer0"]) == to_text(program.blocks["layer0"])


def test_results_of_other_rows_are_refused() -> None:
    program = spread("loop", 2)
    call = next(c for c in program.calls() if c.target == "layer0_combine")
    before = next(c for c in program.calls() if c.target == "layer0_before")
    x = next(u for u in before.users if u.meta["val"].shape[-1] == 44)
    call.args = (x, *call.args[1:])
    with pytest.raises(NotRowwise, match="not made of the rows that were sent"):
        analyse(program)


def test_models_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(BadOption, match="a layer has 5 experts"):
        spread("loop", 2, 4)
    with pytest.raises(BadOption, match="no use"):
        spread("loop", 2, 11)
    dense = make_plain("loop", layers=1)
    dense.layers[0].ffn = Expert(44, 28)
    with pytest.raises(BadOption, match="the model has no experts"):
        go_on(default().run(capture(dense))[0], PartitionExperts(), settings={"experts": ExpertPlan(2)})
    uneven = default().run(capture(with_shared(5, 4)))[0]
    with pytest.raises(UnsupportedConstruct, match="different numbers of experts"):
        go_on(uneven, PartitionExperts(), settings={"experts": ExpertPlan(2)})
