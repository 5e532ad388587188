"""Shared prefixes on real programs: the tokens are eager's, and the log-probabilities those without the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from deepinfer_compile.runtime import bundled
from tests import models
from tests.e2e.parity import eager_tokens, prompts

COUNT = 12
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
    "factor": 8.0,
}
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 96, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the llama model, to be run as a graph."""
    bundle = tmp_path_factory.mktemp("llama") / "b"
    dc.build(models.make("llama"), bundle, native=False)
    return bundle


def ask(llm: dc.LLM, given: list[list[int]]) -> tuple[list[list[int]], list[float], list[int]]:
    """Tokens, all log-probabilities, and how many prompt tokens were there already."""
    params = dc.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    outs = llm.generate(given, params)
    found = [out.outputs[0] for out in outs]
    scores = [entry[token].logprob for one in found for token, entry in zip(one.token_ids, one.logprobs or [])]
    return [list(one.token_ids) for one in found], scores, [out.num_cached_tokens or 0 for out in outs]


@pytest.mark.parametrize(
    ("name", "native"),
    [("gemma", False)]
    + [pytest.param(name, False, marks=pytest.mark.slow) for name in ("llama", "mistral", "deepseek_v3", "gpt_oss")]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in models.CONFIGS],
)
def test_a_crowd_and_its_second_turn(name: str, native: bool, tmp_path: Path) -> None:
    """Five prompts with one beginning, more than seats; then each goes on after its answer. fp32, 1e-4."""
    model = models.make(name)
    dc.build(model, tmp_path / "b", native=native)
    on = dc.load(tmp_path / "b", native=native, **SIZES)
    off = dc.load(tmp_path / "b", native=native, enable_prefix_caching=False, **SIZES)
    shared = prompts(lengths=(140,))[0]
    given = [[*shared, *tail] for tail in prompts(lengths=(1, 5, 17, 40, 70))]
    for turn in range(2):
        tokens, scores, cached = ask(on, given)
        plain, expected, none = ask(off, given)
        assert tokens == plain == [eager_tokens(model, p, COUNT) for p in given]
        assert scores == pytest.approx(expected, abs=1e-4)
        assert none == [0] * 5
        assert cached[1:] == [128] * 4 if turn == 0 else min(cached) >= 128
        given = [[*prompt, *answer, *prompts(lengths=(3,))[0]] for prompt, answer in zip(given, tokens)]
    assert on.prefix_stats.hit_tokens > 0


def test_frequencies_that_depend_on_length(tmp_path: Path) -> None:
    """A prompt beyond the original length does not take rows that were rotated for a shorter one."""
    model = models.make("phi", head_dim=16, rope_parameters=LONG, original_max_position_embeddings=128)
    dc.build(model, tmp_path / "b", native=False)
    llm = dc.load(tmp_path / "b", native=False, **SIZES)
    assert llm.engine._executor.reads_hint
    shared = prompts(lengths=(100,))[0]
    for length, hit in ((100, 0), (150, 0), (150, 128), (100, 64), (90, 0)):
        prompt = [*shared, *prompts(lengths=(100,))[0]][:length]
        tokens, _, cached = ask(llm, [prompt])
        assert cached == [hit]
        assert tokens == [eager_tokens(model, prompt, COUNT)]


def test_new_weights_find_no_old_rows(llama: Path, tmp_path: Path) -> None:
    new = models.make("llama", seed=1)
    new.save_pretrained(tmp_path / "new")
    llm = dc.load(llama, native=False, **SIZES)
    given = prompts(lengths=(150,))
    ask(llm, given)
    assert ask(llm, given)[2] == [128]
    models.make("llama", hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "wrong")
    with pytest.raises(dc.CompileError):
        llm.reload(tmp_path / "wrong")
    assert ask(llm, given)[2] == [128]
    llm.reload(tmp_path / "new")
    tokens, _, cached = ask(llm, given)
    assert cached == [0]
    assert tokens == [eager_tokens(new, given[0], COUNT)]


FRESH = """
import json, sys
import deepinfer_compile as dc
llm = dc.load(sys.argv[1], native=sys.argv[2] == "native", prefix_cache_folder=sys.argv[3], max_model_len=512,
              max_num_batched_tokens=96, max_num_seqs=4)
(out,) = llm.generate(json.loads(sys.argv[4]), dc.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
print(json.dumps([out.outputs[0].token_ids, out.num_cached_tokens, llm.prefix_stats.damaged]))
"""


@pytest.mark.parametrize(
    ("name", "native"), [("llama", False)] + [pytest.param(n, True, marks=pytest.mark.slow) for n in ("llama", "gemma")]
)
def test_a_new_process_finds_rows_on_disk(name: str, native: bool, llama: Path, tmp_path: Path) -> None:
    model, bundle = models.make(name), llama
    if native:
        bundle = tmp_path / "b"
        dc.build(model, bundle, native=True)
    (prompt,) = prompts(lengths=(150,))

    def fresh() -> list[Any]:
        kind = "native" if native else "graph"
        command = [sys.executable, "-c", FRESH, str(bundle), kind, str(tmp_path / "c"), json.dumps([prompt])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[Any] = json.loads(done.stdout)
        return found

    want = eager_tokens(model, prompt, COUNT)
    first = dc.load(bundle, native=native, prefix_cache_folder=tmp_path / "c", **SIZES)
    assert ask(first, [prompt])[::2] == ([want], [0])
    assert first.close()
    assert fresh() == [want, 128, 0]
    if not native:
        return
    for file in (tmp_path / "c").glob("*/*.0.*safetensors"):
        held = file.stat()
        file.write_bytes(file.read_bytes()[:-1])
        os.utime(file, ns=(held.st_atime_ns, held.st_mtime_ns))  # a file without its time is gone, not damaged
    found, cached, damaged = fresh()
    assert (found, cached, damaged > 0) == (want, 0, True)


def test_weights_that_come_back_find_their_rows_on_disk(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = models.make("llama"), models.make("llama", seed=1)
    old.save_pretrained(tmp_path / "old")
    new.save_pretrained(tmp_path / "new")
    llm = dc.load(llama, native=False, prefix_cache_folder=tmp_path / "c", **SIZES)
    given = prompts(lengths=(150,))
    for model, folder, hit in ((new, "new", 0), (old, "old", 0), (new, "new", 128)):
        llm.reload(tmp_path / folder)
        tokens, _, cached = ask(llm, given)
        assert cached == [hit]
        assert tokens == [eager_tokens(model, given[0], COUNT)]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "reload_into", stop)
    with pytest.raises(KeyboardInterrupt):
        llm.reload(tmp_path / "old")
    assert ask(llm, given)[2] == [0]  # weights may be of both
    monkeypatch.undo()
    llm.reload(tmp_path / "old")
    assert ask(llm, given)[2] == [128]
