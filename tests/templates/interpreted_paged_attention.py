"""paged_attention in Triton's interpreter: masks, empty rows, pieces, pages that must not be read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Case, specs
from tests.triton_interpreter import run

SPEC = next(s for s in specs() if s.op is ops.CACHED_ATTENTION)
BASE = SPEC.params(3, 1, 2, 2, 64, torch.float32, 1.0, 0, 0.0, False, 1, False, 1)
"""Three heads over one, keys and values of two elements."""


def config(block_n: int = 64, pieces: int = 1, block_m: int = 16) -> Any:
    return SPEC.config(block_m, block_n, pieces, 4, 1)


def inputs(params: Any, new: tuple[int, ...], lengths: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    return SPEC.inputs(Case("", params, new, lengths), torch.Generator().manual_seed(seed))


def attend(params: Any, given: dict[str, Any], cfg: Any, folder: Path) -> Tensor:
    """One run on a copy of the cache that lies behind a page of NaN, which entry -1 would read."""
    wide = torch.full((given["kv"].shape[0] + 1, *given["kv"].shape[1:]), math.nan, dtype=params.dtype)
    wide[1:] = given["kv"]
    (made,) = run(SPEC, params, cfg, {**given, "kv": wide[1:]}, folder)
    return made


def with_scores(scores: list[float], folder: Path, cfg: Any, poison: float = math.nan) -> Tensor:
    """The softmax of given scores: one query of 1, keys that are the scores, values that are unit vectors."""
    count = len(scores)
    params = replace(BASE, heads=1, key_width=1, value_width=count)
    given = inputs(params, (1,), (count,))
    given["kv"].fill_(poison)
    page = int(given["block_table"][0, 0])
    given["kv"][page, 0, : count - 1, 0, 0] = torch.tensor(scores[:-1])
    given["kv"][page, 1, : count - 1, 0, :count] = torch.eye(count)[:-1]
    given["q"].fill_(1.0)
    given["k"].fill_(scores[-1])
    given["v"].copy_(torch.eye(count)[-1])
    return attend(params, given, cfg, folder)[0, 0]


BLOCKS = [(16, 1), (32, 4), (64, 1), (64, 8)]


@pytest.mark.parametrize(("block_n", "pieces"), BLOCKS)
def test_gen_1_padding_lanes_weigh_nothing(block_n: int, pieces: int, tmp_path: Path) -> None:
    cfg = config(block_n, pieces)
    five = with_scores([-3.0] * 5, tmp_path, cfg)
    assert torch.allclose(five, torch.full((5,), 0.2), rtol=1e-6)
    assert torch.equal(five, with_scores([-3.0] * 5, tmp_path, cfg, poison=1e30))
    far = with_scores([-6e4, -6e4 - 1], tmp_path, cfg)
    # scores of this size have a spacing of 2^-8 in fp32, and times log2(e) again
    assert torch.allclose(far, torch.tensor([0.731, 0.269]), atol=3e-3)
    lone = with_scores([-1e30, -2.0], tmp_path, cfg)
    assert torch.equal(lone, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("length", [1, 5, 127, 128, 129])
def test_gen_1_result_does_not_depend_on_blocks(length: int, tmp_path: Path) -> None:
    params = replace(BASE, key_width=20, value_width=24)
    given = inputs(params, (1,), (length,))
    made = [attend(params, given, config(*block), tmp_path) for block in BLOCKS]
    past = {**given, "kv": given["kv"].nan_to_num(1e30, 1e30, 1e30)}
    assert all(torch.allclose(made[0], other, atol=2e-6) for other in made[1:])
    for block, nan in zip(BLOCKS, made):
        assert torch.equal(nan, attend(params, past, config(*block), tmp_path))


@pytest.mark.parametrize(
    ("pieces", "sinks", "dtype"),
    [(1, True, torch.float32), (1, False, torch.bfloat16), (4, True, torch.bfloat16), (4, False, torch.float32)],
)
def test_mla_2_rows_of_length_0(pieces: int, sinks: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    params = replace(BASE, sinks=sinks, heads=6, kv_heads=2, key_width=32, value_width=32, dtype=dtype, align=16)
    given = inputs(params, (1, 1, 1, 1), (130, 0, 64, 1))
    assert (given["block_table"][1] == -1).all()
    assert int(given["slot"][1]) == -1
    made = attend(params, given, config(pieces=pieces), tmp_path)
    assert not made[1].any()
    keep = torch.tensor([0, 2, 3])
    without = {
        **given,
        **{name: given[name][keep] for name in ("q", "k", "v", "seq_len", "block_table", "slot")},
        "query_start": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
    }
    assert torch.equal(made[keep], attend(params, without, config(pieces=pieces), tmp_path))


@pytest.mark.parametrize("pieces", [1, 4])
def test_mla_2_nothing_but_empty_rows(pieces: int, tmp_path: Path) -> None:
    params = replace(BASE, sinks=True)
    given = inputs(params, (1, 1, 0), (0, 0, 0))
    assert not attend(params, given, config(pieces=pieces), tmp_path).any()
    given = inputs(params, (1, 1, 1, 1), (63, 64, 65, 128))
    made = attend(params, given, config(pieces=pieces), tmp_path)
    wanted = SPEC.op.reference(*given.values())
    assert torch.allclose(made, wanted, atol=2e-6)


@pytest.mark.parametrize("pieces", [1, 4])
def test_padding_tokens_give_0_wherever_they_are(pieces: int, tmp_path: Path) -> None:
    """After the last request, and inside one (its newest token)."""
    given = inputs(BASE, (1, 2, 2), (9, 70, 5))
    given["slot"][2] = -1
    given["slot"][3:] = -1
    cut = {**given, "query_start": given["query_start"][:3], "seq_len": given["seq_len"][:2]}
    cut["block_table"] = given["block_table"][:2]
    cut["kv"] = given["kv"].clone()
    page = int(cut["block_table"][1, 1])
    cut["kv"][page, :, 5] = 0.5  # the padding token's own row, which its slot did not write
    made = attend(BASE, cut, config(pieces=pieces), tmp_path)
    assert not made[2:].any()
    assert made[:2].abs().min() > 0


@pytest.mark.parametrize("pieces", [1, 4])
def test_gen_1_a_row_that_sees_nothing_is_0(pieces: int, tmp_path: Path) -> None:
    """Its token has a slot, but the request has no length."""
    given = inputs(BASE, (1, 1), (0, 6))
    given["slot"][0] = 7
    made = attend(BASE, given, config(pieces=pieces), tmp_path)
    assert not made[0].any()
    assert made[1].abs().min() > 0


def test_mla_1_empty_pieces_are_neutral(tmp_path: Path) -> None:
    """Context lengths 0, 5, 0, 17 and 1 in 8 pieces against one shot; most pieces see nothing."""
    params = replace(BASE, heads=4, kv_heads=2, key_width=16, value_width=16)
    given = inputs(params, (1,) * 5, (0, 5, 0, 17, 1))
    whole = attend(params, given, config(16, 1), tmp_path)
    split = attend(params, given, config(16, 8), tmp_path)
    assert torch.allclose(whole, split, atol=1e-5)
    assert torch.equal(whole[[0, 2]], split[[0, 2]])
    # with one key the piece that has it comes back unchanged
    assert torch.equal(split[4], given["v"][4].repeat_interleave(2, 0))


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 3), (12, 4), (20, 2), (24, 1), (96, 2)])
def test_mla_3_any_number_of_heads(heads: tuple[int, int], tmp_path: Path) -> None:
    params = replace(BASE, heads=heads[0], kv_heads=heads[1], key_width=8, value_width=12)
    given = inputs(params, (1, 1), (65, 1))
    wanted = SPEC.op.reference(*{**given, "kv": given["kv"].clone()}.values())
    made = attend(params, given, config(pieces=2), tmp_path)
    assert torch.allclose(made, wanted, atol=2e-6)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap_at_both_ends(softcap: float, tmp_path: Path) -> None:
    params = replace(BASE, heads=1, key_width=1, value_width=1, softcap=softcap, scale=1e4)
    given = inputs(params, (1,), (4,))
    made = attend(params, given, config(), tmp_path)
    wanted = SPEC.op.reference(*{**given, "kv": given["kv"].clone()}.values())
    assert torch.allclose(made, wanted, rtol=1e-5)


def test_a_window_longer_than_the_context_and_one_of_1(tmp_path: Path) -> None:
    for window in (1, 1000):
        params = replace(BASE, window=window)
        given = inputs(params, (1, 1), (130, 3))
        wanted = SPEC.op.reference(*{**given, "kv": given["kv"].clone()}.values())
        made = attend(params, given, config(16, 4), tmp_path)
        assert torch.allclose(made, wanted, atol=2e-6)
    alone = inputs(replace(BASE, window=1), (1,), (130,))
    made = attend(replace(BASE, window=1), alone, config(), tmp_path)
    assert torch.equal(made[0], alone["v"][0].expand(3, -1))


def test_no_tokens(tmp_path: Path) -> None:
    given = inputs(BASE, (0,), (0,))
    assert attend(BASE, given, config(pieces=2), tmp_path).shape == (0, 3, 2)
