"""Layers with windows above shared keys run on the last rows of a prompt: exact with enough rows, told otherwise."""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer_compile
from deepinfer_compile import LLM, SamplingParams
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import BadOption
from deepinfer_compile.ops import CACHED_ATTENTION
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.replay import bind, weights_from
from deepinfer_compile.runtime.batch import GroupMeta, StepInput
from deepinfer_compile.runtime.kept import kept_inputs
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.pages import demand
from tests.e2e.parity import bundle_tokens, prompts
from tests.e2e.test_yoco import Rows
from tests.yoco_model import VOCAB, Form, eager_tokens, make_yoco

FORM = Form(lower=(0,), upper=(0, 5, 9))
HALO, WIDEST = 13, 9
COUNT = 10
LENGTHS = (150, 1, 77, 90, 64, 200)


@functools.cache
def built(keep: int) -> Path:
    """A bundle of graphs, kept for this process."""
    folder = Path(tempfile.mkdtemp(prefix="keep-"))
    atexit.register(shutil.rmtree, folder)
    deepinfer_compile.build(make_yoco(FORM), folder / "b", native=False, keep=keep)
    return folder / "b"


def poisoned(folder: Path, chunk: int = 24, **options: Any) -> LLM:
    """An engine whose caches hold NaN wherever nothing is written."""
    executor, _ = open_executor(read_bundle(folder), native=False)
    llm = LLM(
        executor,
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        max_model_len=256,
        enable_prefix_caching=False,
        **options,
    )
    for cache in executor.allocated.values():
        cache.fill_(math.nan)
    return llm


@functools.cache
def wanted() -> list[list[int]]:
    model = make_yoco(FORM)
    return [eager_tokens(model, p, COUNT) for p in prompts(VOCAB, LENGTHS)]


def test_with_enough_rows_tokens_are_those_of_eager() -> None:
    """Ragged prompts in chunks of 24 tokens over all requests, some of which keep no row of a chunk."""
    llm, given = poisoned(built(HALO)), prompts(VOCAB, LENGTHS)
    assert bundle_tokens(llm, given, COUNT) == wanted()
    assert bundle_tokens(llm, given[:1], COUNT) == wanted()[:1]
    assert bundle_tokens(llm, given[1:4], COUNT) == wanted()[1:4]


def test_preempted_requests_keep_rows_of_what_they_read_again() -> None:
    folder = built(HALO)
    executor, _ = open_executor(read_bundle(folder), native=False)
    sizes = [(g, demand(g, seats=4, max_model_len=256, chunk=200, backtrack=0)) for g in executor.groups]
    least, most = (
        sum(g.bytes_per_page * pages for g, pages in pool)
        for pool in zip(*(((g, d.one), (g, d.all)) for g, d in sizes))
    )
    llm = poisoned(folder, 200, memory_bytes=least + 4 * (most - least) // 10)  # 8 pages of the context, 12 are needed
    given = prompts(VOCAB, (125, 126, 127, 124))
    model = make_yoco(FORM)
    assert bundle_tokens(llm, given, COUNT) == [eager_tokens(model, p, COUNT) for p in given]
    assert llm.engine.scheduler.preemptions > 0


def test_the_decoder_runs_on_the_last_rows_only() -> None:
    """Of 200 tokens those from position 128 on: 13 rows or more, from a page start."""
    llm = poisoned(built(HALO))
    with Rows() as rows:
        bundle_tokens(llm, prompts(VOCAB, (200,)), 1)
    attending = rows.attending[CACHED_ATTENTION.overload._schema.name]
    lower, first, second = attending[0::3], attending[1::3], attending[2::3]
    assert lower == [24] * 8 + [8]
    assert first == second == [0] * 5 + [16, 24, 24, 8]


def masked(ids: list[int], keep: int) -> Tensor:
    """Logits of the last token where windows see the last `keep` rows only: the split program of one sequence."""
    model = make_yoco(FORM)
    passes = (Canonicalize(), RaiseAttention(), SplitEncoderDecoder(replay="compact", keep=keep))
    program = Pipeline(passes).run(capture(model))[0]
    names = {n.name for n in program.inputs()}
    given = {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.arange(len(ids))[None],
        "kept": torch.arange(len(ids) - keep, len(ids)),
    }
    return program.run({**bind(program, weights_from(model)), **{k: v for k, v in given.items() if k in names}})[0, -1]


def test_with_fewer_rows_logits_are_those_of_masked_windows() -> None:
    """137 tokens with 9 kept: from position 128 on. The last row is not eager's, and is that of the replay."""
    ids = prompts(VOCAB, (137,))[0]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=5)
    told = poisoned(built(WIDEST)).generate([ids], params)[0].outputs[0].logprobs
    assert told is not None
    want = masked(ids, WIDEST).log_softmax(-1)
    with torch.no_grad():
        eager = make_yoco(FORM)(torch.tensor([ids]))[0, -1].log_softmax(-1)
    got = {t: entry.logprob for t, entry in told[0].items()}
    assert max(abs(float(want[t]) - p) for t, p in got.items()) < 1e-4
    assert max(abs(float(eager[t]) - p) for t, p in got.items()) > 1e-3


def test_prompt_logprobs_keep_every_row() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    ids = prompts(VOCAB, (100,))[0]
    told = poisoned(built(WIDEST)).generate([ids], params)[0].prompt_logprobs
    assert told is not None
    with torch.no_grad():
        eager = make_yoco(FORM)(torch.tensor([ids]))[0].log_softmax(-1)
    for at, entry in enumerate(told[1:]):
        assert entry is not None
        assert all(abs(float(eager[at, t]) - e.logprob) < 1e-4 for t, e in entry.items())


def test_what_is_kept_of_a_step() -> None:
    """Requests: a chunk in the middle of a prompt, the end of one, a generated token, a scored one."""
    positions = [*range(40, 44), *range(126, 130), 300, *range(10, 12)]
    hints = [500] * 4 + [130] * 4 + [301] + [400] * 2
    inputs = StepInput(
        input_ids=torch.zeros(11, dtype=torch.int64),
        position_ids=torch.tensor(positions),
        rows=torch.tensor([7, 8, 9]),
        query_start=torch.tensor([0, 4, 8, 9, 11], dtype=torch.int32),
        seq_len=torch.tensor([44, 130, 301, 12], dtype=torch.int32),
        context_hint=torch.tensor(hints),
        groups=(GroupMeta(torch.zeros(4, 8, dtype=torch.int32), torch.zeros(11, dtype=torch.int64)),),
    )
    found = kept_inputs(inputs, 2)
    assert found["kept_start"].tolist() == [448, 128, 256, 0]
    assert found["kept"].tolist() == [6, 7, 8, 9, 10]


def test_the_report_says_what_is_approximate() -> None:
    assert "spent on the last 13 rows of a prompt; exact" in (built(HALO) / "report.md").read_text()
    text = (built(WIDEST) / "report.md").read_text()
    assert "spent on the last 9 rows of a prompt; an approximation, 13 rows would be exact" in text


def test_prefixes_of_kept_prompts_are_not_shared() -> None:
    llm = deepinfer_compile.load(built(HALO), native=False, max_model_len=256, max_num_seqs=2)
    ids = prompts(VOCAB, (150,))[0]
    assert bundle_tokens(llm, [ids], 2) == bundle_tokens(llm, [ids], 2)
    assert llm.prefix_stats.hit_tokens == 0


def test_fewer_rows_than_a_window_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="a window above the boundary is 9"):
        deepinfer_compile.build(make_yoco(FORM), tmp_path / "b", native=False, keep=8)
    with pytest.raises(BadOption, match="it counts rows"):
        deepinfer_compile.build(make_yoco(FORM), tmp_path / "b", native=False, keep=-1)


@pytest.mark.slow
def test_native_programs_keep_rows(tmp_path: Path) -> None:
    deepinfer_compile.build(make_yoco(FORM), tmp_path / "b", keep=HALO)
    llm = deepinfer_compile.load(tmp_path / "b", max_model_len=256, max_num_batched_tokens=24, max_num_seqs=4)
    assert bundle_tokens(llm, prompts(VOCAB, LENGTHS), COUNT) == wanted()
