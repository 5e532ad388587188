"""DeepSeek-V4.1's cache formats against a search over every value of each grid, and models that store in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.bundle.dequant import fp8_block_into, mxfp4_into
from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.generate import (
    State,
    accept,
    generate,
    prefill,
    propose,
    speculate,
    step,
    verify,
)
from deepinfer_compile.models.deepseek_v41.layers import kv_bytes_per_token
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.storage import KEYS, PLAIN, PUBLISHED, ROWS, WINDOW, Forms, Grid
from tests.unit.test_v41_capture import SHORT

GRIDS = {"window": WINDOW, "rows": ROWS, "keys": KEYS}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
POWERS = [2.0**e for e in range(-127, 128)]
WIDTHS: dict[str, Any] = {"head_dim": 32, "index_head_dim": 32}


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def stored() -> DeepseekV41:
    return tiny.make(dtype=torch.float64, forms=PUBLISHED, **WIDTHS)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 307, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def nearest(levels: list[float], value: float) -> int:
    """The code of the level nearest to value, of two the even code."""
    return min(range(len(levels)), key=lambda code: (abs(levels[code] - value), code % 2))


def searched(grid: Grid, line: list[float]) -> tuple[list[float], list[int], list[int]]:
    """Values, number codes (signs apart) and scale codes of one row."""
    levels = E4M3 if grid.bits == 8 else E2M1
    values, codes, scales = [], [], []
    for start in range(0, len(line), grid.group):
        group = line[start : start + grid.group]
        # in fp32, as the published arithmetic; the powers of two are those that hold the quotient
        quotient = torch.tensor(max(max(map(abs, group)), grid.least)) / grid.largest
        if grid.powers:
            scales.append(next(code for code, power in enumerate(POWERS) if power >= float(quotient)))
            scale = POWERS[scales[-1]]
        else:
            scales.append(nearest(E4M3, float(quotient)))
            scale = E4M3[scales[-1]]
        for value in group:
            code = nearest(levels, min(float(torch.tensor(abs(value)) / scale), grid.largest))
            codes.append(code)
            values.append((-1 if value < 0 else 1) * levels[code] * scale)
    return values, codes, scales


@pytest.mark.parametrize("spread", [1e-38, 1e-6, 3e-3, 0.04, 1.0, 300.0])
@pytest.mark.parametrize("kind", list(GRIDS))
def test_rows_are_the_nearest_of_every_value_of_the_grid(kind: str, spread: float) -> None:
    grid = GRIDS[kind]
    torch.manual_seed(0)
    x = torch.randn(3, 2, 64) * spread
    x[0, 0] = 0.0
    x[0, 1, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties where the scale is 1
    x[0, 1, 8:] = 0.0
    x[1, 0, 5] = -6.0 * spread
    data = grid.store(x)
    assert data.dtype == torch.uint8
    assert data.shape == (3, 2, grid.nbytes(64))
    got = grid.load(data, torch.float64)
    for row in range(3):
        for part in range(2):
            values, codes, scales = searched(grid, x[row, part].tolist())
            assert got[row, part].tolist() == values
            stored = data[row, part].tolist()
            numbers = stored[: -len(scales)]
            halves = numbers if grid.bits == 8 else [half for byte in numbers for half in (byte & 15, byte >> 4)]
            sign = 128 if grid.bits == 8 else 8
            assert [half % sign for half in halves] == codes
            assert [half >= sign for half in halves] == [value < 0 for value in x[row, part].tolist()]
            assert stored[-len(scales) :] == scales


def test_bytes_are_those_that_other_readers_read() -> None:
    torch.manual_seed(1)
    x, out = torch.randn(5, 128), torch.empty(5, 128)
    data = KEYS.store(x)
    mxfp4_into(out, data[:, :64].contiguous(), data[:, 64:].contiguous(), "keys")
    assert torch.equal(out, KEYS.load(data, torch.float32))
    data = WINDOW.store(x)
    fp8_block_into(
        out, data[:, :128].contiguous().view(torch.float8_e4m3fn), data[:, 128:].contiguous(), (1, 32), "row", "w"
    )
    assert torch.equal(out, WINDOW.load(data, torch.float32))


@pytest.mark.parametrize("kind", list(GRIDS))
def test_bf16_holds_every_stored_value(kind: str) -> None:
    torch.manual_seed(2)
    data = GRIDS[kind].store(torch.randn(50, 64))
    assert torch.equal(GRIDS[kind].load(data, torch.bfloat16).float(), GRIDS[kind].load(data, torch.float32))


def test_a_token_adds_the_published_bytes() -> None:
    released = DeepseekV41Config()
    assert [WINDOW.nbytes(512), ROWS.nbytes(512), KEYS.nbytes(128)] == [528, 288, 68]
    row = ROWS.nbytes(released.head_dim) + KEYS.nbytes(released.index_head_dim)
    ratios = [released.compress_ratios[source] for source in released.kv_source_layer_ids]
    assert sum(row / ratio for ratio in ratios) == 890 == kv_bytes_per_token(released)
    # the caches themselves, published widths: sources at ratio 2, 2 and 1
    model = tiny.make(forms=PUBLISHED, head_dim=512, index_head_dim=128)
    room = 40
    _, state = prefill(model, tokens(1, 3), room)
    used = sum(t.nbytes for past in state.layers for t in (past.rows, past.keys) if t is not None)
    assert used == room * (288 + 68) * 2
    assert all(past.window.nbytes == 16 * 528 for past in state.layers)
    assert all(ring.nbytes == 16 * 528 for ring in state.drafts)


def same(one: State, two: State) -> None:
    """Bytes are equal to the bit; what is not packed is near."""
    for got, want in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(two)):
        if isinstance(got, Tensor):
            close(got, want) if got.is_floating_point() else torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, 2, 15, 17, 40])
def test_steps_and_blocks_of_a_storing_model_are_its_whole_sequence(stored: DeepseekV41, length: int) -> None:
    ids = tokens(3, length + 9)
    whole = stored(ids)
    logits, state = prefill(stored, ids[:, :length], 80)
    close(logits, whole[:, length - 1])
    block, pending = verify(stored, ids[:, length : length + 6], state)
    close(block, whole[:, length : length + 6])
    state = accept(pending, torch.tensor([3, 3, 3]))
    for p in range(length + 3, length + 9):
        logits, state = step(stored, ids[:, p], state)
        close(logits, whole[:, p])
    same(state, prefill(stored, ids, 80)[1])


def test_drafts_of_a_storing_model_give_its_plain_tokens(stored: DeepseekV41) -> None:
    ids = tokens(2, 9)
    assert torch.equal(speculate(stored, ids, 24)[0], generate(stored, ids, 24))


class Scaled:
    """Rows times a factor, of a width of their own: what is stored and not loaded, or the reverse, shows."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def store(self, x: Tensor) -> Tensor:
        return torch.cat((x * self.factor, x[..., :1]), dim=-1).float()

    def load(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored[..., :-1].to(dtype) / self.factor


def test_every_cache_is_read_through_the_form_it_was_stored_in() -> None:
    plain = tiny.make(dtype=torch.float64)
    other = tiny.make(dtype=torch.float64, forms=Forms(Scaled(8.0), Scaled(16.0), Scaled(32.0)))
    ids = tokens(2, 40)
    torch.testing.assert_close(other(ids), plain(ids), rtol=1e-4, atol=1e-4)
    states = [prefill(model, ids[:, :30], 60)[1] for model in (plain, other)]
    assert states[1].layers[2].rows is not None
    assert states[1].layers[2].rows.shape == (2, 30, 21)
    drafted = []
    for model, state in zip((plain, other), states):
        got, pending = verify(model, ids[:, 30:36], state)
        torch.testing.assert_close(got, plain(ids)[:, 30:36], rtol=1e-4, atol=1e-4)
        logits, after = step(model, ids[:, 36], accept(pending, torch.tensor([6, 6])))
        torch.testing.assert_close(logits, plain(ids)[:, 36], rtol=1e-4, atol=1e-4)
        drafted.append(propose(model, ids[:, 37], after).logits)
    torch.testing.assert_close(drafted[1], drafted[0], rtol=1e-4, atol=1e-4)


def test_index_queries_are_rounded_like_keys(stored: DeepseekV41) -> None:
    torch.manual_seed(3)
    indexer = stored.blocks[2].attn.indexer
    assert indexer is not None
    rotary, places = stored.blocks[2].attn.rotary, torch.arange(5).unsqueeze(0)
    x, low = torch.randn(1, 5, 48, dtype=torch.float64), torch.randn(1, 5, 28, dtype=torch.float64)
    keys = torch.randn(1, 7, 32, dtype=torch.float64)
    got = indexer.scores(x, low, places, keys, rotary)
    queries = rotary(indexer.wq_b(low).unflatten(-1, (3, 32)), places)
    for t in range(5):
        weights = indexer.weights_proj.weight @ x[0, t] * 3**-0.5
        want = torch.zeros(7, dtype=torch.float64)
        for head in range(3):
            values = torch.tensor(searched(KEYS, queries[0, t, head].float().tolist())[0], dtype=torch.float64)
            want += weights[head] * (keys[0] @ values).relu() * 32**-0.5
        close(got[0, t], want)


def test_storing_changes_the_logits_a_little(stored: DeepseekV41) -> None:
    plain = tiny.make(dtype=torch.float64, forms=PLAIN, **WIDTHS)
    ids = tokens(3, 40)
    away = (stored(ids) - plain(ids)).abs().mean()
    assert 1e-3 < away < 0.5 * plain(ids).std()


@pytest.mark.parametrize(
    ("change", "key"), [({"head_dim": 40}, "head_dim"), ({"index_head_dim": 48}, "index_head_dim")]
)
def test_rows_that_are_no_whole_groups_are_refused(change: dict[str, int], key: str) -> None:
    with pytest.raises(BadModelConfig, match=key):
        tiny.make(forms=PUBLISHED, **{**WIDTHS, **change})
    tiny.make(**{**WIDTHS, **change})


@pytest.mark.parametrize("kind", list(GRIDS))
def test_a_group_with_no_finite_maximum_is_not_a_number(kind: str) -> None:
    x = torch.full((2, 64), 6.0)
    x[0, 3], x[1, 3] = torch.nan, -torch.inf
    got = GRIDS[kind].load(GRIDS[kind].store(x), torch.float32)
    group = GRIDS[kind].group
    assert bool(got[:, :group].isnan().all())
    assert torch.equal(got[:, group:], x[:, group:])


def test_the_largest_scale_is_the_last() -> None:
    x = torch.full((1, 16), 6 * 480.0)
    assert torch.equal(ROWS.load(ROWS.store(x), torch.float32), torch.full((1, 16), 6 * 448.0))


class Step(nn.Module):
    """One step as a module, for export."""

    def __init__(self, model: DeepseekV41) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        return step(self.model, token, state)


def test_one_graph_serves_every_step_of_a_storing_model() -> None:
    model = tiny.make(dtype=torch.float64, forms=PUBLISHED, **SHORT, **WIDTHS).requires_grad_(False)
    ids = tokens(2, 24)
    _, state = prefill(model, ids[:, :1], 24)
    graph = torch.export.export(Step(model), (ids[:, 0], state), strict=False).module()
    whole = model(ids)
    for p in range(1, 24):
        logits, state = graph(ids[:, p], state)
        close(logits, whole[:, p])
