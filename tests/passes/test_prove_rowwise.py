"""What the proof accepts is independent token by token, measured; what mixes tokens is refused, with a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import CompileError, NotRowwise
from deepinfer_compile.facts import Fact
from deepinfer_compile.passes.bind_positions import BindPositions
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.fuse_add_norm import FuseAddNorm
from deepinfer_compile.passes.prove_rowwise import ProveRowwise
from deepinfer_compile.passes.raise_activation import RaiseActivation
from deepinfer_compile.passes.raise_output_projection import RaiseOutputProjection
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.passes.raise_rope import RaiseRope
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from deepinfer_compile.rowwise import Rows, analyse
from tests.architectures import FIRST
from tests.passes.harness import check_equal
from tests.passes.stages import canonical, go_on
from tests.unit.test_rope_lengths import build

RAISE = (RaiseRmsNorm(), RaiseRope(), RaiseActivation(), RaiseOutputProjection(), FuseAddNorm())
WIDTH = 24
IDS = torch.randint(0, 40, (1, 9), generator=torch.Generator().manual_seed(1))
Step = Callable[["Small", Tensor, Tensor], Tensor]


class Small(nn.Module):
    """input_ids [1, T] -> step(embedded [1, T, WIDTH], ids): a model in which one step decides."""

    table: Tensor

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        self.embedding = nn.Embedding(40, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.register_buffer("table", torch.randn(40, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.step(self, self.embedding(input_ids), input_ids)


def chosen_experts(m: Small, x: Tensor, ids: Tensor) -> Tensor:
    """Experts gathered a token: repeat, index, batched product, weighted sum."""
    flat = x.reshape(-1, WIDTH)
    weights, picked = flat[:, :3].softmax(-1).topk(2, dim=-1)
    rows = flat.repeat_interleave(2, dim=0)
    out = torch.bmm(rows.unsqueeze(1), m.experts[picked.reshape(-1)]).squeeze(1)
    return (out * weights.reshape(-1, 1)).view(-1, 2, WIDTH).sum(1)[None]


def grouped_router(m: Small, x: Tensor, ids: Tensor) -> Tensor:
    scores = x.view(-1, WIDTH).sigmoid()
    groups = scores.view(-1, 3, 8).topk(2, dim=-1)[0].sum(-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(scores[:, :3]).scatter(1, groups, 1.0)
    kept = mask.unsqueeze(-1).expand(-1, 3, 8).reshape(-1, WIDTH)
    picked = scores.masked_fill(~kept.bool(), -math.inf).topk(4, dim=-1)[1]
    weights = scores.gather(1, picked)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20))[None]


def dense_experts(m: Small, x: Tensor, ids: Tensor) -> Tensor:
    weights, picked = x[..., :3].softmax(-1).topk(2, dim=-1)
    combine = torch.einsum("btk,btke->bte", weights, F.one_hot(picked, 3).to(x.dtype))
    return torch.einsum("bteh,bte->bth", torch.einsum("btd,edh->bteh", x, m.experts), combine)


ROWWISE: dict[str, Step] = {
    "linear": lambda m, x, ids: m.linear(x) @ m.experts[0],
    "pointwise": lambda m, x, ids: torch.where(x > 0, x, m.table[0] * x) * ids[..., None],
    "heads": lambda m, x, ids: x.view(1, -1, 3, 8).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(1, -1, WIDTH),
    "norms": lambda m, x, ids: F.layer_norm(x, (WIDTH,)) + F.rms_norm(x, (WIDTH,)) + x.mean(-1, keepdim=True),
    "table by id": lambda m, x, ids: m.table[ids] + F.embedding(ids, m.table) + m.table.index_select(0, ids[0]),
    "outer product": lambda m, x, ids: (m.table[0][None, :, None] @ ids[:, None, :].float()).transpose(1, 2) + x,
    "parts": lambda m, x, ids: torch.cat([*x.split([5, 19], -1)[::-1], torch.stack(x.chunk(2, -1), 2).flatten(2)], -1),
    "padded": lambda m, x, ids: F.pad(x, (1, 2))[..., 3:].flip(-1).cumsum(-1).sort(-1)[0],
    "uniform rows": lambda m, x, ids: x + torch.ones(x.shape[1], 1) * m.table[1] + m.table[2].expand(x.shape[1], -1),
    "bits": lambda m, x, ids: x * (((ids > 3) & (ids < 30)) | (ids // 7 == 5))[..., None],
    "complex": lambda m, x, ids: torch.view_as_real(torch.view_as_complex(x.view(1, -1, 12, 2)) * 1j).flatten(2),
    "chosen experts": chosen_experts,
    "grouped router": grouped_router,
    "dense experts": dense_experts,
}
MIXED: dict[str, tuple[Step, str, str]] = {
    "mean": (lambda m, x, ids: x - x.mean(1, keepdim=True), "aten.mean", "reduces over the tokens"),
    "sum of all": (lambda m, x, ids: x / x.abs().sum(), "aten.sum", "reduces over the tokens"),
    "longest": (lambda m, x, ids: x * ids.max(), "aten.max", "reduces over the tokens"),
    "softmax": (lambda m, x, ids: x.softmax(1), "aten.softmax", "mixes or orders elements along the token dim"),
    "cumsum": (lambda m, x, ids: x + ids.cumsum(-1)[..., None], "aten.cumsum", "mixes or orders elements"),
    "sort": (lambda m, x, ids: x.sort(1)[0], "aten.sort", "mixes or orders elements"),
    "topk": (lambda m, x, ids: x + x.topk(1, dim=1)[0], "aten.topk", "mixes or orders elements"),
    "flip": (lambda m, x, ids: x.flip(1), "aten.flip", "mixes or orders elements"),
    "first row": (lambda m, x, ids: x + x[:, :1], "aten.slice", "slices the token dimension"),
    "one row": (lambda m, x, ids: x + x[:, 0], "aten.select", "picks one element of the token dimension"),
    "cat": (lambda m, x, ids: torch.cat([x, x], 1), "aten.cat", "joins along the token dimension"),
    "shift": (lambda m, x, ids: F.pad(x, (0, 0, 1, 0))[:, :-1], "aten.pad", "pads the token dimension"),
    "scores": (lambda m, x, ids: x @ x.transpose(1, 2), "aten.matmul", "multiplies tokens with other tokens"),
    "contraction": (lambda m, x, ids: x.transpose(1, 2) @ x, "aten.matmul", "contracts the token dimension"),
    "einsum": (lambda m, x, ids: torch.einsum("btd,bsd->bts", x, x), "aten.einsum", "multiplies tokens with other"),
    "pairs": (lambda m, x, ids: ids[:, :, None] == ids[:, None, :], "aten.eq", "run over tokens in different dim"),
    "square mask": (lambda m, x, ids: torch.ones(x.shape[1], x.shape[1]).tril(), "aten.ones", "two dimensions"),
    "gather rows": (lambda m, x, ids: x[:, ids[0] % 3], "aten.index", "picks tokens by computed indices"),
    "reshape": (lambda m, x, ids: x.reshape(1, WIDTH, -1), "aten.reshape", "merges the token dimension"),
    "transposed view": (lambda m, x, ids: x.transpose(1, 2).reshape(1, -1), "aten.reshape", "merges the token dim"),
    "tiled": (lambda m, x, ids: x.repeat(1, 2, 1), "aten.repeat", "repeats the token dimension as a whole"),
    "attention": (
        lambda m, x, ids: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "aten.scaled_dot_product_attention",
        "attention that no pass has raised",
    ),
    "no rule": (
        lambda m, x, ids: F.conv1d(x.transpose(1, 2), m.experts[..., :3], padding=1),
        "aten.conv1d",
        "no rule says how it treats tokens",
    ),
    "read value": (
        lambda m, x, ids: x * torch.full((1,), ids[0, 0].item(), dtype=x.dtype),
        "aten.select",
        "picks one element of the token dimension",
    ),
    "random": (lambda m, x, ids: x + torch.rand_like(x), "aten.rand_like", "draws random numbers"),
}
MEASURABLE = ("mean", "sum of all", "softmax", "cumsum", "sort", "flip", "one row", "shift", "scores", "gather rows")
"""Cases whose result has one row a token, which show that the measure of this file can fail."""


def proven(model: nn.Module) -> Program:
    return go_on(capture(model), Canonicalize(), BindPositions(), ProveRowwise())[0]


def mixes(program: Program, model: nn.Module, rows: int = 9) -> bool:
    """Measured: whether changing one token changes the result of another one (rows of the result in token order)."""
    weights = bind(program, weights_from(model))
    positions = {n.name: torch.arange(rows)[None] for n in program.inputs() if n.name == "position_ids"}

    def result(ids: Tensor) -> Tensor:
        found: Tensor = program.run({**weights, **positions, "input_ids": ids})
        return found.reshape(rows, -1).nan_to_num()

    base = result(IDS)
    for at in (0, 4, 8):
        changed = IDS.clone()
        changed[0, at] = (changed[0, at] + 17) % 40
        others = [i for i in range(rows) if i != at]
        if not torch.allclose(result(changed)[others], base[others], atol=1e-6):
            return True
    return False


@pytest.mark.parametrize("name", FIRST)
def test_architectures(name: str) -> None:
    """Proven as captured, raised, and with caches."""
    model, before = canonical(name)
    after, records = go_on(
        before, BindPositions(), ProveRowwise(), *RAISE, ProveRowwise(), CacheAttention(), ProveRowwise()
    )
    assert Fact.ROWWISE in after.facts
    assert all(not r.remarks for r in records if r.name == "prove-rowwise")
    assert analyse(after) == Rows("rows", 0)
    check_equal(after, model, chunk=13)


@pytest.mark.parametrize("case", ROWWISE)
def test_independent_steps_are_proven(case: str) -> None:
    model = Small(ROWWISE[case])
    assert not mixes(proven(model), model)


@pytest.mark.parametrize("case", MIXED)
def test_mixing_steps_are_refused(case: str) -> None:
    step, target, reason = MIXED[case]
    model = Small(step)
    program, _ = go_on(capture(model), Canonicalize(), BindPositions())
    with pytest.raises(NotRowwise, match=reason) as caught:
        go_on(program, ProveRowwise())
    if case in MEASURABLE:
        assert mixes(program, model)
    assert caught.value.values["target"] == target
    assert "test_prove_rowwise.py" in caught.value.where


PIECES: list[Step] = [
    lambda m, x, ids: m.linear(x),
    lambda m, x, ids: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1),
    lambda m, x, ids: x + m.table[ids],
    lambda m, x, ids: x.view(1, -1, 3, 8).transpose(1, 2).cumsum(-1).transpose(1, 2).reshape(1, -1, WIDTH),
    lambda m, x, ids: x.view(1, -1, 3, 8).transpose(1, 2).reshape(1, -1, WIDTH),
    lambda m, x, ids: x.reshape(-1, 4).softmax(-1).reshape(1, -1, WIDTH),
    lambda m, x, ids: x.reshape(-1, 4).softmax(0).reshape(1, -1, WIDTH),
    lambda m, x, ids: x.transpose(1, 2).reshape(1, WIDTH, -1).transpose(1, 2),
    lambda m, x, ids: x.transpose(0, 1).transpose(0, 1),
    lambda m, x, ids: torch.cat([x[..., 12:], -x[..., :12]], -1),
    lambda m, x, ids: x - x.amax(1, keepdim=True),
    lambda m, x, ids: torch.einsum("btd,edh->beth", x, m.experts).sum(1),
    lambda m, x, ids: (x.permute(2, 0, 1) * 2).permute(1, 2, 0),
    lambda m, x, ids: x.repeat_interleave(2, dim=1).view(1, -1, 2, WIDTH)[:, :, 1],
    lambda m, x, ids: x.repeat_interleave(2, dim=1).view(1, 2, -1, WIDTH)[:, 1],
    lambda m, x, ids: x.reshape(1, -1, 2, WIDTH // 2).flip(2).flatten(2),
]


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Whatever chain of steps the proof accepts does not mix tokens."""
    draw = random.Random(seed)
    steps = [draw.choice(PIECES) for _ in range(4)]

    def chain(m: Small, x: Tensor, ids: Tensor) -> Tensor:
        for step in steps:
            x = step(m, x, ids)
        return x

    model = Small(chain)
    try:
        program = proven(model)
    except NotRowwise:
        return
    except CompileError:
        pytest.skip("this chain fixes the length")
    assert not mixes(program, model)


@pytest.mark.parametrize("piece", range(len(PIECES)))
def test_every_piece_is_judged_as_measured(piece: int) -> None:
    """Accepted exactly if no mixing is measured, so the random programs are not all refused."""
    model = Small(PIECES[piece])
    program, _ = go_on(capture(model), Canonicalize(), BindPositions())
    try:
        go_on(program, ProveRowwise())
        accepted = True
    except NotRowwise:
        accepted = False
    assert accepted != mixes(program, model)


@pytest.mark.parametrize("form", ["longrope", "dynamic"])
def test_frequencies_by_length_are_chosen_token_by_token(form: str) -> None:
    model = build(form)
    program, _ = go_on(capture(model), Canonicalize(), BindPositions(), ProveRowwise())
    assert analyse(program) == Rows("rows", 0)


# -- wanted rows and metadata ------------------------------------------------------------------------------------------


class Picks(nn.Module):
    """logits of rows that are picked by `pick(rows)`."""

    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pick = pick
        self.embedding = nn.Embedding(40, WIDTH)

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        return torch.tanh(self.embedding(input_ids)[:, self.pick(rows)])


def test_wanted_rows_are_one_token_each() -> None:
    program = proven(Picks(lambda rows: rows))
    assert analyse(program) == Rows("rows", 1)


def test_computed_rows_are_refused() -> None:
    with pytest.raises(NotRowwise, match="indices of wanted rows"):
        proven(Picks(lambda rows: rows - 1))


def test_batch_metadata_is_for_attention_only() -> None:
    """A pass that lets another op read a cache or the metadata is caught."""
    _, before = canonical("llama")
    after, _ = go_on(before, BindPositions(), CacheAttention())
    bad = after.clone()
    graph = bad.blocks["layer0"].graph
    hole = next(n for n in graph.nodes if n.name == "seq_len")
    out = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(out):
        total = graph.call_function(torch.ops.aten.sum.default, (hole,))
        total.meta["val"] = torch.ops.aten.sum.default(hole.meta["val"])
        leak = graph.call_function(torch.ops.aten.add.Tensor, (out.args[0], total))
        leak.meta["val"] = out.args[0].meta["val"]
    out.args = (leak,)
    with pytest.raises(NotRowwise, match="batch metadata or a cache"):
        analyse(bad)
    assert analyse(after) == Rows("rows", 0)


def test_unknown_dialect_op_is_refused() -> None:
    library = torch.library.Library("deepinfer", "FRAGMENT")
    library.define("rowwise_probe(Tensor x) -> Tensor")
    library.impl("rowwise_probe", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("deepinfer::rowwise_probe", lambda x: torch.empty_like(x), lib=library)
    model = Small(lambda m, x, ids: torch.ops.deepinfer.rowwise_probe(x))
    with pytest.raises(NotRowwise, match=r"deepinfer\.rowwise_probe.*no rule"):
        proven(model)


def test_explicit_mask_is_refused() -> None:
    def masked(m: Small, x: Tensor, ids: Tensor) -> Any:
        q = x[:, None]
        return torch.ops.deepinfer.attention(q, q, q, m.table[:1, :1] > 0, None, 1.0, 0, 0.0, True)

    with pytest.raises(NotRowwise, match="an explicit mask"):
        proven(Small(masked))


def test_constants_may_mix_with_themselves() -> None:
    program = proven(Small(lambda m, x, ids: x + m.table.softmax(0).flip(0)[:1].cumsum(0)))
    assert analyse(program) == Rows("tokens", 1)
