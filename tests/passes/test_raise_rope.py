"""Every spelling of rotary embedding becomes one op of the right style; near misses stay, with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.graph import argument, is_op
from deepinfer_compile.ops import COMPLEX_ROPE_TABLE, ROPE
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_rope import RaiseRope
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import IDS, ROWS, check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, program_of, reasons, run
from tests.plain_model import make_plain

DIM = 8
STYLES = {"deepseek_v2": "pair", "deepseek_v3": "pair_to_half"}
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def angles(positions: Tensor) -> Tensor:
    """f32[T, DIM / 2]: position times 10000^(-2i / DIM), formed in fp64."""
    return (positions.double()[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)).float()


def reference(x: Tensor, angle: Tensor) -> Tensor:
    """Adjacent pairs of x [..., T, DIM] turned as complex numbers in fp64."""
    z = torch.view_as_complex(x.double().reshape(*x.shape[:-1], DIM // 2, 2).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle).double(), angle.double())).flatten(-2)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return x * cos + rotate_half(x) * sin


def wide_swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return sin * rotate_half(x) + cos * x


def chunked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def sliced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((cos * x[..., :4] - sin * x[..., 4:], sin * x[..., :4] + cos * x[..., 4:]), dim=-1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def stacked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def selected(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.reshape(*x.shape[:-1], DIM // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).reshape(x.shape)


def doubled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.repeat_interleave(2, dim=-1) + rotate_pairs(x) * sin.repeat_interleave(2, dim=-1)


def spread(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((sin, sin), -1).flatten(-2)
    return x * cos + rotate_pairs(x) * sin


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., :4], x[..., 4:]
    cos, sin = torch.cat((cos, cos), -1)[..., :4], torch.cat((sin, sin), -1)[..., :4]
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


SPELLINGS: dict[Turn, str] = {
    **dict.fromkeys((wide, wide_swapped, chunked, sliced, partial), "half"),
    interleaved: "pair_to_half",
    **dict.fromkeys((stacked, selected, doubled, spread), "pair"),
}
MISSES: dict[str, tuple[Turn, str]] = {
    "unequal halves": (
        lambda x, c, s: x * torch.cat((c, c), -1) + torch.cat((-x[..., 3:], x[..., :3]), -1) * torch.cat((s, s), -1),
        "not the two halves of one value",
    ),
    "two values": (
        lambda x, c, s: x * torch.cat((c, c), -1) + torch.cat((-(x + 1)[..., 4:], x[..., :4]), -1),
        "not the two halves of one value",
    ),
    "no cosine": (lambda x, c, s: x + rotate_half(x) * torch.cat((s, s), -1), "not multiplied by a table and added"),
    "backwards": (
        lambda x, c, s: x * torch.cat((c, c), -1) - rotate_half(x) * torch.cat((s, s), -1),
        "not multiplied by a table and added",
    ),
    "same sign": (
        lambda x, c, s: torch.cat((x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * c), -1),
        "not a rotation of two parts",
    ),
    "halves to pairs": (
        lambda x, c, s: torch.stack((x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * s), -1).flatten(-2),
        "halves are read and adjacent pairs are written",
    ),
    "beside others": (
        lambda x, c, s: torch.cat((x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * s, x), -1),
        "stand beside others",
    ),
    "narrow tables": (lambda x, c, s: x * c[..., :1] + rotate_half(x) * s[..., :1], "tables of width ['1'] do not fit"),
}


class Turns(nn.Module):
    """Every f(x, cos, sin): many spellings are one trace."""

    def __init__(self, *functions: Turn) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x, cos, sin) for f in self.functions)


class ComplexTurn(nn.Module):
    """x [B, T, H, DIM] turned by a complex table [1, T, 1, DIM / 2] that is no parameter and not in the checkpoint."""

    table: Tensor

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        angle = angles(positions)
        table = torch.polar(torch.ones_like(angle), angle)[None, :, None]
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], DIM // 2, 2))
        return torch.view_as_real(z * self.table).flatten(3).type_as(x)


def inputs(tokens: int, heads: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    angle = angles(torch.arange(tokens) + 5)
    x = torch.randn(1, heads, tokens, DIM, generator=torch.Generator().manual_seed(tokens))
    return {"x": x.to(dtype), "cos": angle.cos()[None, None], "sin": angle.sin()[None, None]}


def styles(program: Program, block: str = "prefix") -> list[str]:
    return [argument(n, "style") for n in program.blocks[block].graph.nodes if is_op(n, ROPE.overload)]


def dynamic() -> dict[str, dict[int, object]]:
    return {"x": {2: Dim.AUTO}, "cos": {2: Dim.AUTO}, "sin": {2: Dim.AUTO}}


@pytest.mark.parametrize("name", models.CONFIGS)
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, RaiseRope(), RaiseRope())
    layers = [block for block in before.blocks if block.startswith("layer")]
    assert counts(records[0]) == dict.fromkeys(layers, 2)
    assert not reasons(records[0])
    assert records[1].count("applied") == 0
    assert {s for block in layers for s in styles(after, block)} == {STYLES.get(name, "half")}
    check_equal(after, model)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "deepseek_v3"])
def test_bf16_architectures(name: str) -> None:
    """The products are formed in the model's dtype and rounded once, so the bits are the same."""
    model, before = canonical(name, torch.bfloat16)
    after, _ = go_on(before, RaiseRope())
    weights = weights_from(model)
    assert torch.equal(logits_of(after, weights, IDS, ROWS), logits_of(before, weights, IDS, ROWS))


def test_complex_table_is_split_once_a_layer() -> None:
    """Also where queries and keys each take their own view of it, as the plain decoder does."""
    plain, _ = go_on(capture(make_plain(layers=2)), Canonicalize())
    for before in (canonical("deepseek_v2")[1], plain):
        after, _ = go_on(before, RaiseRope())
        nodes = after.blocks["layer0"].graph.nodes
        assert sum(is_op(n, COMPLEX_ROPE_TABLE.overload) for n in nodes) == 1
        assert not any("complex" in str(n.target) and not is_op(n, COMPLEX_ROPE_TABLE.overload) for n in nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spellings_keep_every_bit(dtype: torch.dtype) -> None:
    """bf16 rows with fp32 tables give fp32, and so does the op, which gets the rows cast."""
    module = Turns(*SPELLINGS)
    before = program_of(module, dynamic(), **inputs(5, dtype=dtype))
    after, records = go_on(before, RaiseRope(), RaiseRope())
    assert [r.count("applied") for r in records] == [len(SPELLINGS), 0]
    assert styles(after) == list(SPELLINGS.values())
    for tokens in (5, 1, 0):
        given = inputs(tokens, dtype=dtype)
        for spelling, got, want in zip(SPELLINGS, run(after, **given), module(**given)):
            assert got.dtype == want.dtype
            assert torch.equal(got, want), spelling.__name__


def test_casts_around_the_products_are_the_op() -> None:
    module = Turns(lambda x, c, s: chunked(x.float(), c, s).to(x.dtype), lambda x, c, s: chunked(x, c, s).to(x.dtype))
    after, _ = go_on(program_of(module, dynamic(), **inputs(5, dtype=torch.bfloat16)), RaiseRope())
    assert [n.op for n in after.blocks["prefix"].graph.nodes] == ["placeholder"] * 3 + ["call_function"] * 2 + [
        "output"
    ]
    given = inputs(7, dtype=torch.bfloat16)
    for got, want in zip(run(after, **given), module(**given)):
        assert torch.equal(got, want)


def test_near_misses() -> None:
    module = Turns(*(f for f, _ in MISSES.values()))
    before = program_of(module, dynamic(), **inputs(5))
    after, records = go_on(before, RaiseRope())
    assert records[0].count("applied") == 0
    wanted = [reason for _, reason in MISSES.values()]
    assert [w in r for w, r in zip(wanted, reasons(records[0]), strict=True)] == [True] * len(wanted)
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


def test_bisection_caps_the_pass() -> None:
    after, records = go_on(program_of(Turns(wide, chunked), **inputs(5)), RaiseRope(), limits={"raise-rope": 1})
    assert records[0].count("applied") == 1
    assert len(styles(after)) == 1


# -- complex tables of original-style checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "dtype", "stride"),
    [
        ((0, 1, 2), torch.float32, 1),
        ((0, 1, 2047, 131071), torch.float32, 1),
        ((0, 1, 2047, 131071), torch.bfloat16, 1),
        ((5, 6, 9), torch.float32, 2),
        ((), torch.float32, 1),
    ],
)
def test_complex_equals_real_form(positions: tuple[int, ...], dtype: torch.dtype, stride: int) -> None:
    """Against cos and sin applied explicitly in fp64; the table keeps fp32 precision whatever x is."""
    at = torch.tensor(positions, dtype=torch.int64)
    module = ComplexTurn(at)
    x = torch.randn(2, len(at), 4, DIM * stride, generator=torch.Generator().manual_seed(2)).to(dtype)[..., :DIM]
    after, records = go_on(program_of(module, x=x), RaiseRope())
    assert records[0].count("applied") == 1
    (got,) = run(after, x=x)
    want = reference(x.transpose(1, 2), angles(at)).transpose(1, 2)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert torch.allclose(got.double(), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 2.0**-8 * 4)
    assert not any("view_as_complex" in str(n.target) for n in after.blocks["prefix"].graph.nodes)


def test_complex_table_is_kept_with_the_program() -> None:
    model = make_plain()
    refs = [r for r in capture(model).weights.values() if r.name == "freqs_cis"]
    assert len(refs) == 1
    assert refs[0].dtype == torch.complex64
    assert refs[0].value is not None
    assert torch.equal(refs[0].value, model.freqs_cis)


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning", "ignore:Complex modules:UserWarning")
def test_real_complex_table_is_refused() -> None:
    x = torch.randn(2, 3, 4, DIM, dtype=torch.bfloat16)
    moved = program_of(ComplexTurn(torch.arange(3)).to(torch.bfloat16), x=x)
    with pytest.raises(UnsupportedConstruct, match="has dropped its imaginary part"):
        go_on(moved, RaiseRope())

    class Casts(ComplexTurn):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.table.to(torch.float32)[..., :1]

    with pytest.raises(UnsupportedConstruct, match="a complex value cast to f32, which drops its imaginary part"):
        go_on(program_of(Casts(torch.arange(3)), x=x.float()), RaiseRope())


def test_complex_near_misses() -> None:
    class Near(ComplexTurn):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return (
                torch.view_as_real(z * self.table.conj()).flatten(3),
                torch.view_as_real(z * self.table).sum(-1),
                torch.view_as_real(self.table),
            )

    _, records = go_on(program_of(Near(torch.arange(3)), x=torch.randn(2, 3, 4, DIM)), RaiseRope())
    assert records[0].count("applied") == 0
    wanted = ["the table is conjugated", "not flattened back", "not of a complex view times a table"]
    assert [w in r for w, r in zip(wanted, reasons(records[0]), strict=True)] == [True] * 3


# -- one rotation, three layouts --------------------------------------------------------------------------------------


def test_styles_agree_on_scores() -> None:
    """Scores q.k of every style equal the complex reference; mixing two layouts of one cache does not."""
    tokens = 5
    given = inputs(tokens)
    q, k = (torch.randn(1, 3, tokens, DIM, generator=torch.Generator().manual_seed(i)) for i in (7, 8))
    angle = angles(torch.arange(tokens) + 5)
    want = reference(q, angle) @ reference(k, angle).transpose(-1, -2)

    def permuted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return wide(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)

    program, _ = go_on(program_of(Turns(stacked, interleaved, permuted, wide), dynamic(), **given), RaiseRope())
    assert styles(program) == ["pair", "pair_to_half", "half", "half"]
    turned_q, turned_k = (run(program, **{**given, "x": x}) for x in (q, k))
    for a, b in list(zip(turned_q, turned_k))[:3]:
        assert torch.allclose((a @ b.transpose(-1, -2)).double(), want, atol=1e-5)
    mixed = turned_q[0] @ turned_k[1].transpose(-1, -2)
    unpermuted = turned_q[3] @ turned_k[3].transpose(-1, -2)
    assert (mixed.double() - want).abs().max() > 0.1
    assert (unpermuted.double() - want).abs().max() > 0.1
    assert math.isclose(turned_q[0].norm().item(), q.norm().item(), rel_tol=1e-5)


def test_golden() -> None:
    before = program_of(Turns(wide, stacked), dynamic(), **inputs(5))
    after, _ = go_on(before, RaiseRope())
    check_golden("raise_rope", before_and_after(before, after, "prefix"))
