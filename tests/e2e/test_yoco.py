"""A decoder whose upper half reads keys of the lower one becomes a bundle that reads prompts with the lower half."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import deepinfer_compile
from deepinfer_compile import LLM, SamplingParams
from deepinfer_compile.builder import compile_model
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.cli.explain_model import explain_bundle
from deepinfer_compile.errors import BadOption
from deepinfer_compile.ops import CACHED_ATTENTION, SHARED_ATTENTION
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.settings import BuildSettings
from tests import models
from tests.e2e.parity import bundle_tokens, check_parity, prompts
from tests.yoco_model import VOCAB, WIDTH, Form, eager_tokens, make_yoco

COUNT = 12
LENGTHS = (1, 5, 70, 3, 33, 1)
FORMS = {"one list": Form(), "two lists": Form(one_list=False), "window between": Form(upper=(0, 5, 0))}


@functools.cache
def wanted(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    model = make_yoco(FORMS[name])
    return [eager_tokens(model, p, COUNT) for p in prompts(VOCAB, lengths)]


def check_generation(folder: Path, name: str, native: bool) -> None:
    """Ragged prompts, read in chunks of 16 tokens, all together, alone and three at a time, go on as by eager."""
    llm = deepinfer_compile.load(folder, native=native, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=4)
    given = prompts(VOCAB, LENGTHS)
    assert bundle_tokens(llm, given, COUNT) == wanted(name)
    assert bundle_tokens(llm, given[:1], COUNT) == wanted(name)[:1]
    assert bundle_tokens(llm, given[2:5], COUNT) == wanted(name)[2:5]


@pytest.mark.parametrize("replay", ["off", "compact"])
def test_generation(replay: str) -> None:
    check_generation(built(replay), "one list", False)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("replay", ["off", "compact"])
@pytest.mark.parametrize("name", FORMS)
def test_generation_of_other_forms(name: str, replay: str, native: bool, tmp_path: Path) -> None:
    deepinfer_compile.build(make_yoco(FORMS[name]), tmp_path / "b", native=native, replay=replay)
    check_generation(tmp_path / "b", name, native)


@functools.cache
def built(replay: str) -> Path:
    """A bundle of graphs, kept for this process."""
    folder = Path(tempfile.mkdtemp(prefix="yoco-"))
    atexit.register(shutil.rmtree, folder)
    deepinfer_compile.build(make_yoco(), folder / "b", native=False, replay=replay)
    return folder / "b"


def small(replay: str) -> LLM:
    """An engine with four pages a cache group, where two requests of 128 tokens would fill them."""
    executor, _ = open_executor(read_bundle(built(replay)), native=False)
    memory = int(4.6 * sum(g.bytes_per_page for g in executor.groups))
    return LLM(executor, max_num_seqs=4, max_num_batched_tokens=16, memory_bytes=memory, max_model_len=128)


@pytest.mark.parametrize("replay", ["off", "compact"])
def test_preempted_requests_read_their_tokens_again(replay: str) -> None:
    llm = small(replay)
    given = prompts(VOCAB, (60, 61, 62, 58))
    assert bundle_tokens(llm, given, COUNT) == wanted("one list", (60, 61, 62, 58))
    assert llm.engine.scheduler.preemptions > 0


def test_logits_of_prompt_tokens_are_those_of_the_whole_model() -> None:
    """prompt_logprobs asks for a row of every token, in chunks: the decoder then runs on all of them."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=2)
    given = prompts(VOCAB, (40, 1, 7))
    told = [
        [(o.prompt_logprobs, o.outputs[0].token_ids) for o in load(replay).generate(given, params)]
        for replay in ("off", "compact")
    ]
    for (off, ids), (auto, same) in zip(*told, strict=True):
        assert ids == same
        assert off is not None
        assert auto is not None
        for a, b in zip(off[1:], auto[1:], strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


def load(replay: str) -> LLM:
    return deepinfer_compile.load(
        built(replay), native=False, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=4
    )


class Rows(TorchDispatchMode):
    """Counts the rows that attend, by operation, and FLOPs of products."""

    def __init__(self) -> None:
        super().__init__()
        self.attending: dict[str, list[int]] = {}
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (CACHED_ATTENTION.overload, SHARED_ATTENTION.overload):
            self.attending.setdefault(func._schema.name, []).append(args[0].shape[0])
        if func is torch.ops.aten.mm.default:
            self.flops += 2 * args[0].shape[0] * args[1].numel()
        return out


def test_the_decoder_runs_on_wanted_rows_only() -> None:
    """70 tokens in chunks of 16 and one token more: the upper three layers see one row of the prompt, not 70."""
    counted = {}
    for replay in ("off", "compact"):
        llm = load(replay)
        with Rows() as rows:
            bundle_tokens(llm, prompts(VOCAB, (70,)), 2)
        counted[replay] = rows
    lower, upper = "deepinfer::cached_attention", "deepinfer::shared_attention"
    chunks = [16, 16, 16, 16, 6, 1]
    for rows in counted.values():
        assert rows.attending[lower] == [n for n in chunks for _ in range(2)]
    assert counted["off"].attending[upper] == [n for n in chunks for _ in range(3)]
    assert counted["compact"].attending[upper] == [n for n in (0, 0, 0, 0, 1, 1) for _ in range(3)]
    every, wanted_rows = prefill_split(built("compact"))["flops"]
    # the wanted row's output projection is a plain linear behind the picked row, and in "off" one operation
    assert counted["off"].flops - counted["compact"].flops == 69 * wanted_rows - 2 * VOCAB * WIDTH
    assert every + wanted_rows > 2 * every


def prefill_split(folder: Path) -> dict[str, Any]:
    program = json.loads((folder / "programs/prefill.json").read_text())
    found: dict[str, Any] = program["info"]["split"]
    return found


def test_the_report_says_where_and_why() -> None:
    text = (built("compact") / "report.md").read_text()
    assert "encoder-decoder, boundary at layer 2: 3 global attentions of layers 2 to 4 read keys made of" in text
    assert "prefill: of 118,368 FLOPs of matrix products a token 64,800 (55%) are spent on the rows" in text
    told = explain_bundle(read_bundle(built("compact")))
    assert [line in text for line in told["split"]] == [True, True]
    assert "narrow-decoder, skeleton: prefix_decoder: replay is off" in (built("off") / "report.md").read_text()


def test_programs_for_few_tokens_run_every_layer() -> None:
    """A decode step wants all of its rows, so that picking them would only cost."""
    compiled = compile_model(make_yoco(), BuildSettings())
    replays = {name: p.info["split"]["replay"] for name, p in compiled.programs.items()}
    assert replays == {"prefill": "compact", "decode": "off", "verify": "off"}
    assert [c.name for c in compiled.programs["decode"].caches] == ["cache_0_0", "cache_1_0", "cache_2_0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_published_models_that_share_keys(name: str, tmp_path: Path) -> None:
    """Their last layers read keys and values of the last layers before them, global ones and those of a window."""
    check_parity(models.make(name), tmp_path / "b", native=False, count=48)
    assert prefill_split(tmp_path / "b")["replay"] == "compact"


def test_an_unknown_replay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="replay"):
        deepinfer_compile.build(make_yoco(), tmp_path / "b", native=False, replay="some")


@pytest.mark.parametrize("replay", ["off", "compact"])
def test_prefixes_are_found_again(replay: str) -> None:
    """The shared cache holds a prompt's every token, however few rows the decoder ran on: a later prompt may use it."""
    llm = load(replay)
    base = prompts(VOCAB, (100,))[0]
    given = [base[:70], [*base[:70], 5, 9], base[:66]]
    model = make_yoco()
    for prompt in given:
        assert bundle_tokens(llm, [prompt], 4) == [eager_tokens(model, prompt, 4)]
    assert llm.prefix_stats.hit_tokens > 0
