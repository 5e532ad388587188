"""The DeepSeek-V4.1 form as a bundle: windows, compressed rows, two levels of choice, hashed memory, four streams."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import deepinfer_compile
from deepinfer_compile import LLM, SamplingParams
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.storage import PUBLISHED
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.loading import open_executor
from tests import v41
from tests.e2e.parity import bundle_tokens, prompts
from tests.trained import ced_model, data

VOCAB, COUNT = 300, 12
LENGTHS = (5, 1, 70, 3, 33)


@functools.cache
def wanted(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    model = v41.make()
    return [v41.eager_tokens(model, p, COUNT) for p in prompts(VOCAB, lengths)]


@functools.cache
def built() -> Path:
    """A bundle of graphs, kept for this process."""
    folder = Path(tempfile.mkdtemp(prefix="v41-"))
    atexit.register(shutil.rmtree, folder)
    deepinfer_compile.build(v41.make(), folder / "b", native=False)
    return folder / "b"


def check_generation(folder: Path, native: bool) -> None:
    """Ragged prompts in chunks of 16 tokens, alone, three at a time, and again, when their pages are found."""
    llm = deepinfer_compile.load(folder, native=native, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=3)
    given = prompts(VOCAB, LENGTHS)
    assert bundle_tokens(llm, given, COUNT) == wanted()
    assert bundle_tokens(llm, given[2:3], COUNT) == wanted()[2:3]
    cached = [o.num_cached_tokens for o in llm.generate(given, SamplingParams(temperature=0.0, max_tokens=1))]
    assert max(cached) == 64
    assert bundle_tokens(llm, given[1:4], COUNT) == wanted()[1:4]


def test_generation() -> None:
    check_generation(built(), native=False)


def test_preempted_requests_read_their_tokens_again() -> None:
    executor, _ = open_executor(read_bundle(built()), native=False)
    memory = int(4.6 * sum(g.bytes_per_page for g in executor.groups))
    llm = LLM(executor, max_num_seqs=4, max_num_batched_tokens=16, memory_bytes=memory, max_model_len=128)
    lengths = (60, 61, 62, 58)
    assert bundle_tokens(llm, prompts(VOCAB, lengths), COUNT) == wanted(lengths)
    assert llm.engine.scheduler.preemptions > 0


@pytest.mark.slow
def test_native_generation(tmp_path: Path) -> None:
    deepinfer_compile.build(v41.make(), tmp_path / "b")
    check_generation(tmp_path / "b", native=True)


@pytest.mark.slow
def test_caches_of_published_forms(tmp_path: Path) -> None:
    """Rows are rounded where they are made, on the same grids, and kept as their bytes, also for who asks again. In
    fp64, where nothing is near the edge of two."""
    model = tiny.make(dtype=torch.float64, forms=PUBLISHED, head_dim=32, index_head_dim=32)
    deepinfer_compile.build(model, tmp_path / "b", native=False)
    llm = deepinfer_compile.load(tmp_path / "b", native=False, max_model_len=128, max_num_batched_tokens=64)
    given = prompts(VOCAB, (5, 40, 77))
    with torch.no_grad():
        want = [v41.eager_tokens(model, p, COUNT) for p in given]
    assert bundle_tokens(llm, given, COUNT) == want
    assert bundle_tokens(llm, given, COUNT) == want
    assert llm.prefix_stats.hits > 0
    executor, _ = open_executor(read_bundle(tmp_path / "b"), native=False)
    executor.allocate((2,) * len(executor.groups))
    assert sum(cache.dtype == torch.uint8 for cache in executor.allocated.values()) == 10 + 2 * 3


@pytest.mark.slow
def test_native_caches_of_published_forms(tmp_path: Path) -> None:
    model = tiny.make(forms=PUBLISHED, **{**v41.SHORT, "head_dim": 32, "index_head_dim": 32}).requires_grad_(False)
    deepinfer_compile.build(model, tmp_path / "b")
    llm = deepinfer_compile.load(tmp_path / "b", max_model_len=128, max_num_batched_tokens=64)
    given = prompts(VOCAB, (5, 40, 77))
    with torch.no_grad():
        assert bundle_tokens(llm, given, COUNT) == [v41.eager_tokens(model, p, COUNT) for p in given]


SCRIPT = """
import json, sys
import deepinfer_compile
from tests.e2e.parity import bundle_tokens
llm = deepinfer_compile.load(sys.argv[1], max_num_seqs=4, max_num_batched_tokens=256, max_model_len=1024)
print(json.dumps(bundle_tokens(llm, json.loads(sys.argv[2]), int(sys.argv[3]))))
"""


@pytest.mark.slow
def test_a_trained_model_built_from_its_folder(tmp_path: Path) -> None:
    """By the command, run by a new process: the eager model's greedy tokens for starts of held-out files."""
    folder, count = data.HERE / "ced", 256
    command = [sys.executable, "-m", "deepinfer_compile.cli", "build", str(folder), "-o", str(tmp_path / "b")]
    subprocess.run(command, check=True, capture_output=True)
    model, tokenizer = ced_model.load(folder)
    files = data.of_kind(data.sources(), "held")
    lengths = (300, 5, 64, 141, 33)
    given = [tokenizer.encode(f.text).ids[:n] for f, n in zip(files, lengths)]
    script = [sys.executable, "-c", SCRIPT, str(tmp_path / "b"), json.dumps(given), str(count)]
    done = subprocess.run(script, check=True, capture_output=True, text=True)
    with torch.no_grad():
        want = [v41.eager_tokens(model, ids, count) for ids in given]
    assert json.loads(done.stdout.splitlines()[-1]) == want


def masked_tokens(program: Program, prompt: list[int], start: int, count: int) -> list[int]:
    """Greedy tokens where windows above the boundary see no row before `start`: the whole sequence again for each."""
    weights, ids = bind(program, weights_from(v41.make())), list(prompt)
    for _ in range(count):
        given = {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(len(ids))[None]}
        logits = program.run({**weights, **given, "kept": torch.arange(start, len(ids))})
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_decoders_read_the_last_rows_of_prompts(tmp_path: Path) -> None:
    """From the page on that holds the last 16: what windows do not see in the whole model's own program with a mask."""
    keep, lengths, count = 16, (130, 70), 6
    deepinfer_compile.build(v41.make(), tmp_path / "b", native=False, keep=keep)
    llm = deepinfer_compile.load(tmp_path / "b", native=False, max_model_len=256, max_num_batched_tokens=300)
    found = bundle_tokens(llm, prompts(VOCAB, lengths), count)
    before = v41.canonical()[1]
    program = Pipeline((SplitEncoderDecoder(replay="mask", keep=keep),), given=before.facts).run(before)[0]
    for tokens, prompt in zip(found, prompts(VOCAB, lengths)):
        start = max(0, len(prompt) - keep) // PAGE_SIZE * PAGE_SIZE
        assert tokens == masked_tokens(program, prompt, start, count)


@pytest.mark.slow
def test_a_prompt_goes_on_from_the_last_rows_of_the_one_before(tmp_path: Path) -> None:
    """Of 160 tokens, the windows of the last 31 reach as far as they must: tokens stay exact when a prompt is found up
    to 128, and only the pages whose windows are whole are in the tree."""
    deepinfer_compile.build(v41.make(), tmp_path / "b", native=False, keep=31)
    llm = deepinfer_compile.load(tmp_path / "b", native=False, max_model_len=256, max_num_batched_tokens=300)
    (whole,) = prompts(VOCAB, (190,))
    assert bundle_tokens(llm, [whole[:160]], COUNT) == wanted_of(whole[:160])
    windows = [[group.reach is not None for group in llm.engine.scheduler.prefix.groups]]
    node, held = llm.engine.scheduler.prefix.root, []
    while node.children:
        (node,) = node.children.values()
        held.append([page >= 0 for page in node.pages])
    # 160 - 31 is in page 2: before it, groups of windows have nothing
    assert held == [[not w for w in windows[0]]] * 2 + [[True] * len(windows[0])] * (len(held) - 2)
    for prompt in (whole[:170], whole, whole[:130]):
        assert bundle_tokens(llm, [prompt], COUNT) == wanted_of(prompt)
    found = llm.generate([whole], SamplingParams(temperature=0.0, max_tokens=1))[0].num_cached_tokens
    assert found == 128


def wanted_of(prompt: list[int]) -> list[list[int]]:
    return [v41.eager_tokens(v41.make(), prompt, COUNT)]


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_as_many_rows_as_windows_reach_are_exact(native: bool, tmp_path: Path) -> None:
    lengths = (130, 5, 200, 70, 64, 33)
    deepinfer_compile.build(v41.make(), tmp_path / "b", native=native, keep=31)
    split = json.loads((tmp_path / "b" / "programs" / "prefill.json").read_text())["info"]["split"]
    assert (split["halo"], split["exact"]) == (31, True)
    for budget in (300, 16):
        llm = deepinfer_compile.load(
            tmp_path / "b", native=native, max_model_len=256, max_num_batched_tokens=budget, max_num_seqs=4
        )
        assert bundle_tokens(llm, prompts(VOCAB, lengths), COUNT) == wanted(lengths)
