"""Small steps filled up with requests of nobody, as graphs would replay them, give what the programs give.

There is no graph here: what is replayed runs the program again on the inputs that the graph would read.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import deepinfer_compile
from deepinfer_compile import LLM
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.runtime import small_graphs
from deepinfer_compile.runtime.cuda_graphs import PackedInputs
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.small_graphs import SIZES, SmallGraphs, filled_up
from tests import models, v41
from tests.e2e.parity import bundle_tokens, prompts
from tests.plain_model import make_plain
from tests.runtime.test_packed_inputs import CPU, step
from tests.yoco_model import Form, make_yoco


class Replayed(SmallGraphs):
    """Graphs whose replay runs the program. ran: sizes of the steps that were replayed, and their tokens."""

    ran: list[tuple[int, int]]

    def run(self, given: Any) -> Tensor | None:
        found = super().run(given)
        if found is not None:
            self.ran.append((self.state.tokens, given["input_ids"].shape[-1]))
            assert len(found) == len(given["rows"])
        return found

    def _capture(self, size: int, columns: int, given: Any) -> Any:
        self.state.tokens = size
        packed = PackedInputs(given, size, columns, CPU, small_graphs.FIXED)
        captured = SimpleNamespace(packed=packed, logits=torch.empty(0))

        def replay() -> None:
            assert set(packed.inputs) == set(given)
            captured.logits = self.program.run(packed.inputs)

        captured.graph = SimpleNamespace(replay=replay)
        return captured


class Stand:
    """`Graphs` without a device."""

    def __init__(self, executor: BundleExecutor) -> None:
        self.executor, self.made = executor, dict[str, Replayed]()

    def decode(self, program: Any) -> None:
        return None

    def small(self, name: str, program: Any) -> Replayed:
        self.made[name] = Replayed(program, CPU, self.executor.max_model_len, self.executor.state)
        self.made[name].ran = []
        return self.made[name]


def opened(folder: Path, *, graphs: bool) -> tuple[LLM, Stand]:
    """An engine whose caches hold NaN wherever nothing is written."""
    executor, _ = open_executor(read_bundle(folder), native=False)
    stand = Stand(executor)
    executor.make_graphs = stand if graphs else None
    options: dict[str, Any] = {"max_num_batched_tokens": 40, "max_model_len": 256, "max_num_seqs": 4}
    llm = LLM(executor, **options)
    for cache in executor.allocated.values():
        cache.fill_(math.nan if cache.is_floating_point() else -99)
    return llm, stand


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))


LENGTHS = (150, 1, 77, 90, 33, 64, 200, 3)
FORM = Form(lower=(0,), upper=(0, 5, 9))


@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        ("yoco", 13),
        pytest.param("plain", 0, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 0, marks=pytest.mark.slow),
        pytest.param("v41", 31, marks=pytest.mark.slow),
        pytest.param("v41", 0, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_steps_that_are_not_filled_up(tmp_path: Path, kind: str, keep: int) -> None:
    """Ragged prompts in chunks of 40 tokens over all requests, then others that go on from their pages."""
    make: dict[str, Any] = {"yoco": lambda: make_yoco(FORM), "plain": lambda: make_plain("loop"), "v41": v41.make}
    model = make[kind]() if kind in make else models.make(kind)
    deepinfer_compile.build(model, tmp_path / "b", native=False, **({"keep": keep} if keep else {}))
    given = prompts(96, LENGTHS)
    more = [[*p, 7, 5, 3] for p in given]
    (plain, _), (llm, stand) = opened(tmp_path / "b", graphs=False), opened(tmp_path / "b", graphs=True)
    for asked in (given, given[:1], more):
        assert bundle_tokens(llm, asked, 5) == bundle_tokens(plain, asked, 5)
    ran = [one for steps in stand.made.values() for one in steps.ran]
    assert {size for size, _ in ran} >= {16, 64}
    assert any(tokens < size for size, tokens in ran)


def given(requests: list[int], size: int) -> dict[str, Tensor]:
    found = step(size, 3, 0)
    tokens = sum(requests)
    ends = torch.tensor([0, *requests]).cumsum(0).to(torch.int32)
    wide = {name: held[..., :tokens] for name, held in found.items() if held.dim() == 2 and name.endswith("s")}
    return {**found, **wide, "query_start": ends}


@pytest.mark.parametrize("requests", [[1], [16], [3, 4, 1], [1] * 16, [15, 1], [7, 8]])
def test_every_token_that_is_missing_is_a_request(requests: list[int]) -> None:
    starts = filled_up(given(requests, 16), 16)["query_start"]
    assert starts.dtype == np.int32
    counts = np.diff(starts).tolist()
    missing = 16 - sum(requests)
    assert counts == [*requests, *[1] * missing, *[0] * (16 - len(requests) - missing)]


def test_steps_that_are_not_small_are_left() -> None:
    graphs = SmallGraphs(None, CPU, 4096, None)  # type: ignore[arg-type]
    assert graphs.run({"input_ids": torch.zeros(1, SIZES[-1] + 1)}) is None
    assert graphs.run({"input_ids": torch.zeros(1, 20), "kept": torch.zeros(19)}) is None


@pytest.mark.parametrize(("pages", "columns"), [(1, 16), (16, 16), (17, 64), (65, 100), (100, 100), (101, 101)])
def test_tables_are_of_few_widths(pages: int, columns: int) -> None:
    graphs = SmallGraphs(None, CPU, 6400, None)  # type: ignore[arg-type]
    assert graphs._columns({"block_table_0": torch.zeros(2, 1), "block_table_1": torch.zeros(2, pages)}) == columns
