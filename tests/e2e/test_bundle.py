"""A bundle in other hands: moved, loaded where the compiler is missing, reloaded, tied, refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer_compile as dc
from deepinfer_compile.errors import (
    BadOption,
    BadRequest,
    BundleCorrupt,
    ContextTooLong,
    NotABundle,
    NotAModelFolder,
    NoTokenizer,
    OutputExists,
    UnknownOption,
    UnknownTarget,
    WeightMismatch,
    WrongTarget,
)
from tests import models
from tests.e2e.parity import bundle_tokens, eager_tokens, prompts

RUN = """
import sys
for name in ("transformers", "triton", "jinja2", "networkx", "onnx", "torch._inductor", "torch._dynamo"):
    sys.modules[name] = None
import json, time, torch
begin = time.perf_counter()
import deepinfer_compile as dc
llm = dc.load(sys.argv[1], native=sys.argv[2] == "native", max_model_len=256)
seconds = time.perf_counter() - begin
out = llm.generate(json.loads(sys.argv[3]), dc.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
print(json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in out], "seconds": seconds}))
"""


def in_fresh_process(bundle: Path, kind: str, given: list[list[int]]) -> dict[str, Any]:
    command = [sys.executable, "-c", RUN, str(bundle), kind, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.make("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def bundle(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("b") / "llama.bundle"
    dc.build(llama, out, native=True)
    return out


@pytest.mark.parametrize("kind", ["native", "graph"])
def test_moved_bundle_runs_without_the_compiler(kind: str, llama: Any, bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(bundle, moved)
    given = prompts(lengths=(5, 30))
    got = in_fresh_process(moved, kind, given)
    assert got["tokens"] == [eager_tokens(llama, p, 8) for p in given]


def test_tied_weights_are_stored_once(llama: Any, bundle: Path) -> None:
    size = sum(f.stat().st_size for f in (bundle / "weights").iterdir())
    unique = sum(p.numel() * p.element_size() for p in llama.parameters())
    assert unique <= size < unique + 64 * 1024
    names = dc.load(bundle).files.weights()
    assert names["model.embed_tokens.weight"] is names["lm_head.weight"]


def test_reload_in_place_equals_a_fresh_build(bundle: Path, tmp_path: Path) -> None:
    other = models.make("llama", seed=7, tie_word_embeddings=True)
    other.save_pretrained(tmp_path / "other")
    llm = dc.load(bundle)
    given = prompts(lengths=(9,))
    llm.reload(tmp_path / "other")
    assert bundle_tokens(llm, given, 12) == [eager_tokens(other, given[0], 12)]
    wrong = models.make("llama", hidden_size=48, tie_word_embeddings=True)
    wrong.save_pretrained(tmp_path / "wrong")
    with pytest.raises(WeightMismatch):
        llm.reload(tmp_path / "wrong")
    assert bundle_tokens(llm, given, 12) == [eager_tokens(other, given[0], 12)]
    stream = llm.stream(given, dc.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    next(iter(stream))
    with pytest.raises(BadRequest, match="running"):
        llm.reload(tmp_path / "other")
    stream.close()


def test_a_folder_builds_what_a_module_builds(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "hf")
    given = prompts(lengths=(4, 20))
    for weights in ("copy", "link"):
        dc.build(tmp_path / "hf", tmp_path / weights, native=False, weights=weights)
        llm = dc.load(tmp_path / weights, native=False)
        assert bundle_tokens(llm, given, 8) == [eager_tokens(llama, p, 8) for p in given]


def test_bad_input_is_refused_by_name(llama: Any, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match="max_len"):
        dc.build(llama, tmp_path / "x", max_len=3)
    with pytest.raises(BadOption, match="dtype"):
        dc.build(llama, tmp_path / "x", dtype="int3")
    with pytest.raises(BadOption, match="max_model_len"):
        dc.build(llama, tmp_path / "x", native=False, max_model_len=1 << 20)
    with pytest.raises(UnknownTarget, match="abacus"):
        dc.build(llama, tmp_path / "x", target="abacus")
    with pytest.raises(NotAModelFolder):
        dc.build(tmp_path / "nothing", tmp_path / "x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(OutputExists):
        dc.build(llama, tmp_path / "mine", native=False)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["mine"]
    with pytest.raises(NotABundle):
        dc.load(tmp_path / "mine")
    with pytest.raises(ContextTooLong):
        dc.load(bundle, max_model_len=1 << 20)
    with pytest.raises(WrongTarget, match="abacus"):
        dc.load(bundle, target="abacus")
    with pytest.raises(BadOption, match="memory_fraction"):
        dc.load(bundle, memory_fraction=0.0)
    with pytest.raises(NoTokenizer):
        dc.load(bundle).generate("text")


def test_a_changed_byte_of_native_code_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    victim = next((copy / "kernels").rglob("*.so"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(BundleCorrupt, match=victim.name):
        dc.load(copy)


def test_a_bundle_for_another_torch_is_refused_with_the_way_out(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    with pytest.raises(WrongTarget, match="native=False"):
        dc.load(bundle)
    dc.load(bundle, native=False)


def test_no_compiler_is_an_error_before_anything_is_written(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DEEPINFER_COMPILE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(dc.CompileError, match="no-such-compiler"):
        dc.build(llama, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_bnd_3_a_bundle_for_another_processor_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_compile.runtime import variants

    isa = dc.load(bundle).files.manifest.variants["cpu"]["requires"]["isa"]
    monkeypatch.setitem(variants.ISA_FLAGS, isa, ("avx4096",))
    with pytest.raises(WrongTarget, match="avx4096"):
        dc.load(bundle)
    monkeypatch.delitem(variants.ISA_FLAGS, isa)
    with pytest.raises(WrongTarget, match=isa):
        dc.load(bundle)
    dc.load(bundle, native=False)


def test_two_bundles_live_in_one_process(llama: Any, bundle: Path, tmp_path: Path) -> None:
    other = models.make("llama", seed=5)
    dc.build(other, tmp_path / "other")
    given = prompts(lengths=(6,))
    first, second = dc.load(bundle), dc.load(tmp_path / "other")
    assert bundle_tokens(second, given, 6) == [eager_tokens(other, given[0], 6)]
    assert bundle_tokens(first, given, 6) == [eager_tokens(llama, given[0], 6)]
