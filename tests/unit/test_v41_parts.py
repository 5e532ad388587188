"""DeepSeek-V4.1's parts against the same arithmetic written again in plain loops, fp64 unless said, to 1e-10."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deepinfer_compile.ops  # noqa: F401  registers the dialect
from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.attention import Shared, best
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config, Yarn
from deepinfer_compile.models.deepseek_v41.engram import Engram, look_back, multipliers, normalised_map, table_sizes
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.parts import Rotary, StreamMixer, collapse, expand
from tests.unit import v41_oracle as oracle

# few rows, so that at 31 tokens both levels of the choice leave some out
NARROW: dict[str, Any] = {"sliding_window": 7, "index_topk": 4, "candidate_topk_blocks": 2, "candidate_block_size": 3}


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return tiny.make(seed=3, dtype=torch.float64, **NARROW)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("last", [1, 0])  # 0: a layer with a window alone after layers with rows
def test_every_layers_attention_is_the_loops(last: int) -> None:
    model = tiny.make(seed=3, dtype=torch.float64, compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, last), **NARROW)
    torch.manual_seed(0)
    length = 31
    positions = torch.arange(length).expand(2, length)
    shared: Shared | None = None
    plain: list[oracle.Global | None] = [None, None]
    for layer in model.blocks:
        x = torch.randn(2, length, 48, dtype=torch.float64)
        got, shared, _ = layer.attn(x, positions, shared)
        for b in range(2):
            want, plain[b] = oracle.attention(layer.attn, model.config, x[b], plain[b])
            close(got[b], want)
    end = plain[0]
    assert end is not None
    assert end.candidates is not None
    assert len(end.candidates[-1]) < length  # both levels left rows out
    assert len(end.chosen[-1]) == 4


def test_rows_are_seen_only_when_their_tokens_are(model: DeepseekV41) -> None:
    torch.manual_seed(1)
    attn = model.blocks[2].attn
    x = torch.randn(1, 9, 48, dtype=torch.float64)
    _, shared, _ = attn(x, torch.arange(9).unsqueeze(0), None)
    seen = [int(line.sum()) for line in shared.chosen[0]]
    assert seen == [0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_the_best_are_chosen_and_the_earlier_of_equals() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 9.0, 3.0]])
    allowed = torch.tensor([[True, True, True, True, False, True]])
    assert best(scores, allowed, 2).tolist() == [[False, True, True, False, False, False]]
    assert best(scores, allowed, 9).tolist() == allowed.tolist()


def test_the_newest_block_is_a_candidate_whatever_its_score(model: DeepseekV41) -> None:
    indexer = model.blocks[6].attn.indexer
    assert indexer is not None
    scores = torch.arange(12.0, 0.0, -1.0).view(1, 1, 12)  # best first, two blocks of three kept
    numbers, seen = torch.arange(12).unsqueeze(0), torch.tensor([[11]])
    _, candidates = indexer.choose(scores, numbers, seen, None)
    assert candidates is not None
    assert candidates[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 9, 10]


def test_rotation_turns_back() -> None:
    torch.manual_seed(0)
    rotary = Rotary(8, 500.0, Yarn(factor=4.0, fast=8.0, original=64))
    x, positions = torch.randn(2, 5, 3, 20, dtype=torch.float64), torch.randint(0, 999, (2, 5))
    turned = rotary(x, positions)
    close(turned[1, 4, 2], oracle.turned(x[1, 4, 2], int(positions[1, 4]), rotary.frequencies))
    close(rotary(turned, positions, inverse=True), x)
    assert torch.equal(turned[..., :12], x[..., :12])


def test_stretched_frequencies_keep_the_fast_and_divide_the_slow() -> None:
    released = DeepseekV41Config()
    plain = [released.compress_rope_theta ** (-2 * i / 64) for i in range(32)]
    stretched = Rotary.of(released, ratio=2).frequencies
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(plain[-1] / 16)
    assert all(p / 16 <= s <= p for p, s in zip(plain, stretched))
    assert Rotary.of(released, ratio=0).frequencies == [10000 ** (-2 * i / 64) for i in range(32)]


def test_streams_are_mixed_as_the_loops(model: DeepseekV41) -> None:
    torch.manual_seed(2)
    layer, k = model.blocks[0], 3
    streams, y = torch.randn(1, 2, k, 48, dtype=torch.float64), torch.randn(1, 2, 48, dtype=torch.float64)
    scale, base = layer.hc_ffn_scale, layer.hc_ffn_base
    pre, post, comb = StreamMixer(model.config)(streams, layer.hc_ffn_fn, base, scale)
    close(comb.sum(-1), torch.ones(1, 2, k, dtype=torch.float64), 1e-4)
    close(comb.sum(-2), torch.ones(1, 2, k, dtype=torch.float64), 1e-4)
    flat = streams[0, 1].flatten()
    raw = layer.hc_ffn_fn @ oracle.norm(flat, torch.ones_like(flat))
    grid = torch.stack([(raw[6 + 3 * j : 9 + 3 * j] * scale[2] + base[6 + 3 * j : 9 + 3 * j]).exp() for j in range(k)])
    grid = grid / grid.sum(1, keepdim=True) + 1e-6
    for i in range(39):  # columns, then 19 times rows and columns
        axis = i % 2
        grid = grid / (grid.sum(axis, keepdim=True) + 1e-6)
    close(comb[0, 1], grid)
    want_pre = [1 / (1 + math.exp(-float(raw[i] * scale[0] + base[i]))) + 1e-6 for i in range(k)]
    close(pre[0, 1], torch.tensor(want_pre, dtype=torch.float64))
    close(collapse(streams, pre)[0, 1], sum(want_pre[j] * streams[0, 1, j] for j in range(k)))  # type: ignore[arg-type]
    after = expand(streams, y, post, comb)
    for i in range(k):
        want_post = 2 / (1 + math.exp(-float(raw[k + i] * scale[1] + base[k + i])))
        want = want_post * y[0, 1] + sum(grid[j, i] * streams[0, 1, j] for j in range(k))
        close(after[0, 1, i], want)


def test_a_sublayer_is_fed_by_the_mix_before_it(model: DeepseekV41) -> None:
    """The first attention sees stream 0 alone: other streams do not reach it; the feed-forward part sees them."""
    torch.manual_seed(4)
    layer, config = model.blocks[0], model.config
    seen: list[torch.Tensor] = []
    handles = [
        m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in (layer.attn_norm, layer.ffn_norm)
    ]
    positions, grams = torch.arange(4).unsqueeze(0), torch.zeros(1, 4, 4, dtype=torch.int64)
    streams = torch.randn(1, 4, 3, 48, dtype=torch.float64)
    one_hot = torch.tensor([1.0, 0, 0], dtype=torch.float64).expand(1, 4, 3)
    after, pre, _, _ = layer(streams, one_hot, positions, grams, None)
    for handle in handles:
        handle.remove()
    assert torch.equal(seen[0], streams[:, :, 0])
    fed, post, comb = StreamMixer(config)(streams, layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale)
    between = expand(streams, layer.attn(layer.attn_norm(seen[0]), positions, None)[0], post, comb)
    close(seen[1], collapse(between, fed))
    ffn = StreamMixer(config)(between, layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale)
    close(pre, ffn[0])
    close(after, expand(between, layer.ffn(layer.ffn_norm(seen[1])), ffn[1], ffn[2]))


@pytest.mark.parametrize("spread", [1.0, 30.0])  # 30: both clamps at work
def test_experts_are_the_dialects_and_the_loops(spread: float) -> None:
    torch.manual_seed(5)
    moe, limit = tiny.make(seed=1, dtype=torch.float32, num_experts_per_tok=2).blocks[3].ffn, 10.0
    x = spread * torch.randn(1, 6, 48)
    route = torch.ops.deepinfer.route(
        x[0] @ moe.gate.weight.t(), moe.gate.bias, "sqrt_softplus", 2, 1, 1, "max", True, 1e-20, 1.5
    )
    ids, weights = moe.gate(x[0])
    order, wanted = ids.sort(-1), route[0].long().sort(-1)
    assert torch.equal(order.values, wanted.values)
    close(weights.gather(1, order.indices), route[1].gather(1, wanted.indices), 1e-5)
    got = moe(x)
    for t in range(6):
        want = moe.shared_experts(x[0, t])
        for e, w in zip(ids[t], weights[t]):
            gate, up = moe.experts.w13[e, :20] @ x[0, t], moe.experts.w13[e, 20:] @ x[0, t]
            want = want + moe.experts.w2[e] @ (w * F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))
        close(got[0, t], want, 1e-4)


def test_memory_rows_are_the_hashes_in_plain_integers(model: DeepseekV41) -> None:
    config, engram = model.config, model.blocks[4].engram
    assert isinstance(engram, Engram)
    ids = torch.tensor([[5, 210, 7, 7, 0, 33]])
    pad = int(model.token_map[config.engram_pad_id])
    grams = look_back(ids, model.no_history(ids))
    assert grams[0, 0].tolist() == [5, pad, pad, pad]
    assert grams[0, 4].tolist() == [0, 7, 7, 210]
    got, odd, sizes = engram.rows(grams), multipliers(config, 4), table_sizes(config)[4]
    assert all(m % 2 for m in odd)
    for t in range(6):
        want = []
        for n in (2, 3, 4):
            hashed = 0
            for i in range(n):
                hashed ^= (int(ids[0, t - i]) if t >= i else pad) * odd[i]
            assert 0 <= hashed < 2**63
            for head in range(3):
                table = (n - 2) * 3 + head
                want.append(sum(sizes[:table]) + hashed % sizes[table])
        assert got[0, t].tolist() == want


def test_memory_is_gated_per_stream(model: DeepseekV41) -> None:
    torch.manual_seed(6)
    engram = model.blocks[1].engram
    assert isinstance(engram, Engram)
    streams, grams = torch.randn(1, 2, 3, 48, dtype=torch.float64), torch.randint(0, 211, (1, 2, 4))
    got = engram(streams, grams)
    made = (engram.wkv.weight @ engram.embed.weight[engram.rows(grams)[0, 1]].flatten()).view(4, 48)
    for i in range(3):
        h, one = streams[0, 1, i], torch.ones(48, dtype=torch.float64)
        d = float(oracle.norm(h, engram.q_weight[i]) @ oracle.norm(made[i], engram.k_weight[i] * one)) / math.sqrt(48)
        gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), 1e-6)), d)))
        close(got[0, 1, i], h + gate * made[3])


def test_spellings_fold_and_another_vocabulary_is_refused() -> None:
    texts = ["Été", "ete", "ETE", " a", "\t\na", "a", "ﬁ", "fi", "  ", "\n"]
    small = tiny.config(vocab_size=10, engram_compressed_vocab_size=5)
    assert normalised_map(small, texts).tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 4]
    with pytest.raises(BadModelConfig, match="engram_compressed_vocab_size"):
        normalised_map(tiny.config(vocab_size=10, engram_compressed_vocab_size=6), texts)
    with pytest.raises(BadModelConfig, match="vocab_size"):
        DeepseekV41(tiny.config(), torch.arange(9))


def test_tables_of_another_size_are_refused() -> None:
    shape = tiny.config()
    with pytest.raises(BadModelConfig, match="engram_num_embeddings"):
        DeepseekV41(shape.with_(engram_num_embeddings=(500, 600)), torch.zeros(307, dtype=torch.int64))


def test_tensors_have_the_published_names(model: DeepseekV41) -> None:
    names = set(model.state_dict())
    attn = {"wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"}
    wanted = {f"layers.2.attn.{n}.weight" for n in attn} | {"layers.2.attn.attn_sink"}
    wanted |= {f"layers.2.attn.compressor.{n}.weight" for n in ("wkv", "wgate", "norm")}
    wanted |= {f"layers.2.attn.indexer.{n}.weight" for n in ("wq_b", "weights_proj", "wk", "k_norm")}
    wanted |= {"layers.2.ffn.gate.weight", "layers.2.ffn.gate.bias", "layers.2.ffn.shared_experts.w1.weight"}
    wanted |= {f"layers.1.engram.{n}" for n in ("embed.weight", "wkv.weight", "q_weight", "k_weight")}
    wanted |= {f"layers.2.hc_{s}_{p}" for s in ("attn", "ffn") for p in ("fn", "base", "scale")}
    assert wanted <= names
    assert "layers.6.attn.compressor.wgate.weight" not in names
    assert "layers.8.attn.indexer.wk.weight" not in names
    assert "layers.3.attn.indexer.wq_b.weight" not in names
