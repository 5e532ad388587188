"""Latent attention against public bug reports: each test names the case and holds its recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import argument, is_op
from deepinfer_compile.ops import ATTENTION, CACHED_LATENT_ATTENTION, LATENT_ATTENTION
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.choose_latent_form import ChooseLatentForm
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests import models
from tests.passes.harness import IDS, eager_logits, run_passes

D = torch.ops.deepinfer
INF, NAN = math.inf, math.nan
RAISED = (Canonicalize(), RaiseLatentAttention(require=True))


def merged(out: float, lse: float) -> tuple[Tensor, Tensor]:
    """The good piece (1, 0.3) merged with a piece of one value, in both orders, which must agree."""
    good = torch.ones(3, 2, 4), torch.full((3, 2), 0.3)
    other = torch.full((3, 2, 4), out), torch.full((3, 2), lse)
    first, second = D.merge_attention(*good, *other), D.merge_attention(*other, *good)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    return first


@pytest.mark.parametrize("garbage", [0.0, NAN, 5.0, INF, -1e30])
def test_mla_1_an_empty_piece_is_neutral(garbage: float) -> None:
    out, lse = merged(garbage, -INF)
    assert torch.equal(out, torch.ones(3, 2, 4))
    assert torch.equal(lse, torch.full((3, 2), 0.3))


def test_mla_1_two_empty_pieces() -> None:
    nothing = torch.full((3, 2, 4), NAN), torch.full((3, 2), -INF)
    out, lse = D.merge_attention(*nothing, *nothing)
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert torch.equal(lse, torch.full((3, 2), -INF))


def piece(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, D] over one piece of keys [n, H, D] with its log-sum-exp; garbage if there are no keys."""
    if not len(k):
        return torch.full(q.shape, NAN), torch.full(q.shape[:2], -INF)
    s = torch.einsum("thd,nhd->thn", q, k)
    return torch.einsum("thn,nhd->thd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("seed", range(3))
def test_mla_1_ragged_batch_in_chunks(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    for length in (0, 5, 0, 17, 1):
        q, k, v = (torch.randn(n, 2, 4, generator=gen) for n in (3, length, length))
        total = torch.full(q.shape, NAN), torch.full(q.shape[:2], -INF)
        for start in range(0, 20, 4):
            total = D.merge_attention(*total, *piece(q, k[start : start + 4], v[start : start + 4]))
        want = piece(q, k, v)
        if length:
            assert (total[0] - want[0]).abs().max() <= 1e-5
            assert (total[1] - want[1]).abs().max() <= 1e-5
        else:
            assert torch.equal(total[0], torch.zeros_like(q))
            assert torch.equal(total[1], want[1])


HEADS, NOPE, ROPE, LATENT, VALUE, PAGE = 16, 16, 64, 512, 16, 64


def decode(lengths: list[int], keep: list[int], form: str) -> Tensor:
    """One decode step of the requests in `keep` out of a batch of these lengths, pages poisoned with NaN."""
    gen = torch.Generator().manual_seed(1)
    count, pages = len(lengths), 16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(torch.bfloat16)

    q_nope, q_rope = draw(count, HEADS, NOPE), draw(count, HEADS, ROPE)
    c, k_rope = draw(count, LATENT), draw(count, ROPE)
    w_uk, w_uv = draw(HEADS, NOPE, LATENT) / 20, draw(HEADS, LATENT, VALUE) / 20
    latent = torch.full((pages, PAGE, LATENT + ROPE), NAN, dtype=torch.bfloat16)
    table = torch.full((count, 3), -1, dtype=torch.int32)
    slot = torch.full((count,), -1)
    free = iter(torch.randperm(pages, generator=gen).tolist())
    for r, length in enumerate(lengths):
        need = -(-length // PAGE)
        rows = draw(length, LATENT + ROPE)
        for p in range(need):
            table[r, p] = next(free)
            held = rows[p * PAGE : (p + 1) * PAGE]
            latent[table[r, p], : len(held)] = held
        if length:
            slot[r] = table[r, need - 1] * PAGE + (length - 1) % PAGE
    starts = torch.arange(len(keep) + 1, dtype=torch.int32)
    rows_kept = torch.tensor(keep, dtype=torch.long)
    got: Tensor = D.cached_latent_attention(
        *(t[rows_kept] for t in (q_nope, q_rope, c, k_rope)),
        *(w_uk, w_uv, latent, starts, torch.tensor(lengths, dtype=torch.int32)[rows_kept]),
        *(table[rows_kept], slot[rows_kept], 0.1, form),
    )
    return got


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("lengths", [[130, 0, 64, 1], [63, 64, 65, 128], [0, 0, 0], [0], [1, 0, 127]])
def test_mla_2_rows_of_length_0(lengths: list[int], form: str) -> None:
    everything = list(range(len(lengths)))
    got = decode(lengths, everything, form)
    alive = [r for r in everything if lengths[r]]
    dead = [r for r in everything if not lengths[r]]
    assert not got.isnan().any()
    assert torch.equal(got[dead], torch.zeros_like(got[dead]))
    if alive:
        assert torch.equal(got[alive], decode(lengths, alive, form))
    assert torch.equal(got, decode(lengths, everything, form))


SCALES = [
    (None, 0.0721688, 1.0),
    ((0.707, 0.707), 0.114721, 1.0),
    ((1.0, 1.0), 0.135234, 1.0),
    ((1.0, 0.707), 0.114721, 1.085726),
]


def scaled_model(pair: tuple[float, float] | None) -> Any:
    """DeepSeek-V3 with the published widths of attention and a YaRN factor of 40."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if pair is not None:
        rope |= {"rope_type": "yarn", "factor": 40.0, "mscale": pair[0], "mscale_all_dim": pair[1]}
        rope["original_max_position_embeddings"] = 4096
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 24, "kv_lora_rank": 512}
    sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 1, "max_position_embeddings": 163840}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return models.make("deepseek_v3", rope_parameters=rope, **sizes)


def scales(program: Program, op: Any) -> list[float]:
    """The scale of every call of an op."""
    nodes = [n for gm in program.blocks.values() for n in gm.graph.nodes]
    return [argument(n, "scale") for n in nodes if is_op(n, op.overload)]


@pytest.mark.parametrize(("pair", "scale", "ratio"), SCALES)
def test_mla_4_scale_before_and_after_the_pass(pair: tuple[float, float] | None, scale: float, ratio: float) -> None:
    model = scaled_model(pair)
    program = capture(model)
    before = scales(run_passes(model, Canonicalize(), program=program)[0], ATTENTION)
    assert before == pytest.approx([scale], abs=1e-6)
    assert scales(run_passes(model, *RAISED, program=program)[0], LATENT_ATTENTION) == before
    for form in ("absorbed", "expanded"):
        cached, _ = run_passes(model, *RAISED, CacheAttention(), ChooseLatentForm(form), program=program)
        assert scales(cached, CACHED_LATENT_ATTENTION) == before
    assert model.model.rotary_emb.attention_scaling == pytest.approx(ratio, abs=1e-6)


def test_mla_4_logits_at_far_positions() -> None:
    """Positions 1, 7 and 4097, in chunks, against the unfused model in fp64: a one-key softmax hides the scale."""
    model, wide = scaled_model((1.0, 0.707)), scaled_model((1.0, 0.707)).double()
    ids = torch.randint(0, models.VOCAB, (4098,), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [1, 7, 4097]
    with torch.no_grad():
        want = wide.lm_head(wide.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, rows]).float()
    program = capture(model)
    for form in ("absorbed", "expanded"):
        cached, _ = run_passes(model, *RAISED, CacheAttention(), ChooseLatentForm(form), program=program)
        got = logits_of(cached, weights_from(model), ids, rows, 2049)
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def rotated(x: Tensor, positions: Tensor, style: str) -> Tensor:
    """x [T, 8] turned by the op in one of its styles."""
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(4).double() / 4)
    turned: Tensor = D.rope(x, angle.cos(), angle.sin(), style)
    return turned


def complex_scores(q: Tensor, k: Tensor, positions: Tensor, pairs: str) -> Tensor:
    """q.k with adjacent or half-split pairs as complex numbers turned by e^(i p w)."""
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(4).double() / 4)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(x: Tensor) -> Tensor:
        parts = x.reshape(-1, 4, 2) if pairs == "adjacent" else x.reshape(-1, 2, 4).transpose(1, 2)
        return torch.view_as_complex(parts.contiguous()) * turn

    return (turned(q)[:, None] * turned(k)[None].conj()).real.sum(-1)


@pytest.mark.parametrize(("style", "pairs"), [("pair", "adjacent"), ("pair_to_half", "adjacent"), ("half", "halves")])
def test_mla_5_styles_equal_the_complex_reference(style: str, pairs: str) -> None:
    gen = torch.Generator().manual_seed(4)
    q, k = (torch.randn(5, 8, generator=gen).double() for _ in range(2))
    positions = torch.arange(5)
    got = rotated(q, positions, style) @ rotated(k, positions, style).t()
    assert (got - complex_scores(q, k, positions, pairs)).abs().max() <= 1e-5


def test_mla_5_mixing_styles_changes_scores() -> None:
    """Prefill cached one way, decode the other: the styles are not exchangeable, so the test above can fail."""
    gen = torch.Generator().manual_seed(4)
    q, k = (torch.randn(5, 8, generator=gen).double() for _ in range(2))
    positions = torch.arange(5)
    mixed = rotated(q, positions, "pair_to_half") @ rotated(k, positions, "half").t()
    assert (mixed - complex_scores(q, k, positions, "adjacent")).abs().max() > 0.1


@pytest.mark.parametrize("interleave", [True, False])
def test_mla_5_order_of_tokens_matters(interleave: bool) -> None:
    model = models.make("deepseek_v3", rope_interleave=interleave, num_hidden_layers=1)
    program, _ = run_passes(model, *RAISED, CacheAttention())
    swapped = [IDS[1], IDS[0], *IDS[2:]]
    out = []
    for ids in (IDS, swapped):
        got = logits_of(program, weights_from(model), ids, [44], 9)
        want = eager_logits(model, ids, [44])
        assert (got - want).abs().max() <= 2e-6 * max(1.0, want.abs().max().item())
        out.append(got)
    assert (out[0] - out[1]).abs().max() > 2e-5


@pytest.mark.parametrize(("name", "compressed"), [("deepseek_v2", None), ("deepseek_v3", None), ("deepseek_v3", 48)])
def test_mla_6_with_and_without_query_compression(name: str, compressed: int | None) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 16}
    sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 24, "kv_lora_rank": 32}
    model = models.make(name, q_lora_rank=compressed, num_hidden_layers=2, first_k_dense_replace=1, **sizes)
    program, _ = run_passes(model, *RAISED, CacheAttention())
    names = {ref.name for ref in program.weights.values()}
    assert names <= set(weights_from(model))
    assert any("q_a_proj" in n for n in names) == (compressed is not None)
    ids = IDS[:7]
    got = logits_of(program, weights_from(model), ids, list(range(7)), 6)
    want = eager_logits(model, ids, list(range(7)))
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("queries", "keys", "wanted"), [(1, 5, [2.0]), (2, 5, [1.5, 2.0]), (5, 2, [0.0, 0.0, 0.0, 0.0, 0.5])]
)
def test_mla_7_corner_of_the_causal_mask(queries: int, keys: int, wanted: list[float]) -> None:
    q, k = torch.zeros(1, 1, queries, 4), torch.randn(1, 1, keys, 4)
    v = torch.arange(keys).float().view(1, 1, keys, 1)
    got = D.attention(q, k, v, None, None, 1.0, 0, 0.0, True).flatten()
    assert (got - torch.tensor(wanted)).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["kv", "latent"])
@pytest.mark.parametrize("chunks", [(7,), (3, 3, 1), (1,) * 7, (63, 64, 65), (191, 1)])
def test_mla_7_chunks_equal_one_shot(chunks: tuple[int, ...], kind: str) -> None:
    """Uniform scores, v_j = j: the mean of everything up to a row's own position, whatever the chunks."""
    total = sum(chunks)
    pages = -(-total // PAGE)
    table = torch.arange(pages, dtype=torch.int32).flip(0)[None]
    kv = torch.full((pages, 2, PAGE, 1, 2), NAN)
    latent = torch.full((pages, PAGE, 1 + 2), NAN)
    out, start = [], 0
    for n in chunks:
        at = torch.arange(start, start + n)
        slot = table[0, at // PAGE].long() * PAGE + at % PAGE
        meta = (torch.tensor([0, n], dtype=torch.int32), torch.tensor([start + n], dtype=torch.int32), table, slot)
        rows = at.float().view(n, 1)
        if kind == "kv":
            args = torch.zeros(n, 1, 2), torch.randn(n, 1, 2), rows[:, None].expand(n, 1, 2)
            got = D.cached_attention(*args, kv, *meta, 1.0, 0, 0.0, None)[:, 0, 0]
        else:
            zero = torch.zeros(n, 1, 2)
            got = D.cached_latent_attention(
                *(zero, zero, rows, torch.randn(n, 2), torch.zeros(1, 2, 1), torch.ones(1, 1, 1), latent),
                *(*meta, 1.0, "absorbed" if n < 8 else "expanded"),
            )[:, 0, 0]
        out.append(got)
        start += n
    want = torch.arange(total).float() / 2
    assert (torch.cat(out) - want).abs().max() <= 1e-6 * max(1, total)
