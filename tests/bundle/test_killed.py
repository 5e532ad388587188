"""kill -9 at random points of a build, of a write to the artifact cache and of a reload: nothing is left half written.

Half of the points are file system calls, where a torn state would be made; half are moments, as a machine chooses them.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from deepinfer_compile import builder
from deepinfer_compile.artifacts import cached, is_intact, key_name
from deepinfer_compile.bundle import read_bundle
from tests import models
from tests.bundle.killing import count_calls, killed_after, killed_at
from tests.bundle.support import tree_bytes

SIZES = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2}
OLD, NEW = 48, 64
POINTS = [20, pytest.param(100, marks=pytest.mark.slow)]


def tiny(seed: int = 0) -> Any:
    return models.make("llama", seed=seed, num_hidden_layers=1, num_key_value_heads=1, **SIZES)


def built(out: Path, model: Any, length: int) -> None:
    dc.build(model, out, native=False, max_model_len=length)


def moments(points: int, span: float) -> list[float]:
    """Random times within 1.2 of what the work takes, the last of them too late."""
    return [random.Random(n).random() * 1.2 * span for n in range(points)]


def taken(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


@pytest.mark.parametrize("points", POINTS)
def test_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: int) -> None:
    """Over an old bundle. Capture and passes write nothing, so all points but the slow version's moments come after."""
    model, out = tiny(), tmp_path / "b"
    whole = builder.compile_model
    compiled = whole(model, builder.BuildSettings.of(native=False))
    monkeypatch.setattr(builder, "compile_model", lambda *args: compiled)
    built(out, model, OLD)
    seen: set[int] = set()

    def check() -> None:
        # every chunk of every file is hashed: old or new, whole
        length = int(read_bundle(out, check="full").manifest.model["max_model_len"])
        seen.add(length)
        if length == NEW:
            built(out, model, OLD)

    calls = count_calls(lambda: built(out, model, OLD), lambda: built(out, model, NEW))
    assert calls > 100
    for n in range(points // 2):
        at = random.Random(n).randrange(1, calls + 1) if n % 2 else calls - n
        assert killed_at(at, lambda: built(out, model, NEW)), at
        check()
    if points >= 100:
        monkeypatch.setattr(builder, "compile_model", whole)
    for at in moments(points // 2, taken(lambda: built(out, model, OLD))):
        killed_after(at, lambda: built(out, model, NEW))
        check()
    assert seen == {OLD, NEW}
    built(out, model, NEW)
    assert os.listdir(tmp_path) == ["b"], "the next build cleans up after the killed ones"


def fill(folder: Path) -> None:
    """What a compiler leaves: several files, one in a folder of its own."""
    (folder / "src").mkdir()
    for name, size in (("kernel.so", 60_000), ("kernel.json", 900), ("src/kernel.cpp", 7_000)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("points", POINTS)
def test_artifact_cache(tmp_path: Path, points: int, damaged: bool) -> None:
    """Into an empty cache, or over a damaged entry: afterwards there is a whole entry, or a miss that is filled."""
    root, key = tmp_path / "cache", {"kind": "test", "n": 1}
    entry = root / key_name(key)
    (tmp_path / "want").mkdir()
    fill(tmp_path / "want")
    want = tree_bytes(tmp_path / "want")

    def prepare() -> None:
        shutil.rmtree(root, ignore_errors=True)
        if damaged:
            (cached(key, fill, root) / "kernel.json").write_bytes(b"half")

    def check() -> None:
        if entry.exists() and not is_intact(entry, key):
            assert damaged, "half an entry"
            assert (entry / "data" / "kernel.json").read_bytes() == b"half", "half an entry in place of the damaged one"
        assert tree_bytes(cached(key, fill, root)) == want
        assert is_intact(entry, key)

    whole = 0
    calls = count_calls(prepare, lambda: cached(key, fill, root))
    for n in range(points // 2):
        prepare()
        assert killed_at(random.Random(n).randrange(1, calls + 1), lambda: cached(key, fill, root))
        whole += is_intact(entry, key)
        check()
    prepare()
    for at in moments(points // 2, taken(lambda: cached(key, fill, root))):
        prepare()
        killed_after(at, lambda: cached(key, fill, root))
        check()
    prepare()
    assert killed_at(calls, lambda: cached(key, fill, root))
    assert is_intact(entry, key), "the last call comes after the entry is in place"
    assert whole < points // 2


@pytest.mark.parametrize("points", POINTS)
def test_reload(tmp_path: Path, points: int) -> None:
    """A process that exchanges its weights again and again: bundle and checkpoints stay, byte for byte."""
    for seed in (1, 2):
        tiny(seed).save_pretrained(tmp_path / f"model{seed}")
    built(tmp_path / "b", tmp_path / "model1", NEW)
    before = tree_bytes(tmp_path)
    llm = dc.load(tmp_path / "b", native=False)

    def work() -> None:
        for n in range(2, 12):
            llm.reload(tmp_path / f"model{1 + n % 2}")

    span = taken(work)
    for n, at in enumerate(moments(points, span)):
        if n % 2:
            killed_after(at, work)
        else:
            killed_at(random.Random(n).randrange(1, 40), work)
        assert tree_bytes(tmp_path) == before, n
    params = dc.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = [list(x.generate([[5, 6, 7]], params)[0].outputs[0].token_ids) for x in (llm, dc.load(tmp_path / "b"))]
    llm.reload(tmp_path / "model1")
    assert list(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids) == tokens[1]
