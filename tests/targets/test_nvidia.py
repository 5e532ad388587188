"""A GPU variant beside a CPU one in a bundle: built without a GPU, shown, and refused where it cannot run."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deepinfer_compile as dc
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.cli import app
from deepinfer_compile.errors import BundleCorrupt, KernelTooLarge, MissingExtra, TargetUnavailable, WrongTarget
from deepinfer_compile.graphjson import from_json, to_json
from deepinfer_compile.kernels import call_of, render_stamp
from deepinfer_compile.runtime import cubins, loading
from deepinfer_compile.runtime.launch import check_operands, plan_from_json, tensors_of
from deepinfer_compile.runtime.stored import read_programs
from deepinfer_compile.targets import TARGETS, nvidia, triton_compiler
from deepinfer_compile.targets.nvidia import SM90
from tests import models
from tests.e2e.parity import bundle_tokens, eager_tokens, prompts
from tests.e2e.test_bundle import in_fresh_process


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.make("llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def bundle(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu") / "llama.bundle"
    dc.build(llama, out, target="nvidia-sm90")
    return out


def blocks(bundle: Path) -> dict[str, Any]:
    files = read_bundle(bundle)
    return {name: files.json(path) for name, path in files.manifest.variants["nvidia-sm90"]["blocks"].items()}


def test_every_dialect_call_has_a_kernel_or_a_reason(bundle: Path) -> None:
    files = read_bundle(bundle)
    variant = files.manifest.variants["nvidia-sm90"]
    assert variant["native"]
    assert variant["requires"] == {"device": "cuda", "capability": [9, 0]}
    seen: dict[str, set[str]] = {"bound": set(), "left": set()}
    for name, program in files.manifest.programs.items():
        for digest in files.json(program["file"])["blocks"].values():
            block = files.json(variant["blocks"][digest])
            graph = from_json(block["graph"])
            assert to_json(graph) == files.json(f"programs/blocks/{digest}.json")
            found = block["programs"][name]
            for node in graph.graph.nodes:
                if call_of(node, name) is not None:
                    assert (node.name in found["kernels"]) != (node.name in found["left"])
            seen["bound"] |= {f"{name} {entry['op']}" for entry in found["kernels"].values()}
            seen["left"] |= {f"{name} {entry['op']}" for entry in found["left"].values() if entry["reason"]}
    assert {"decode deepinfer.rms_norm", "decode deepinfer.add_rms_norm"} <= seen["bound"]
    assert {f"{name} deepinfer.cached_attention" for name in ("prefill", "decode", "verify")} <= seen["bound"]
    assert {"decode deepinfer.output_projection", "decode aten.linear"} <= seen["left"]
    assert not seen["bound"] & seen["left"]
    assert any("decode: 8 of 9 dialect calls have a kernel" in note for note in variant["notes"])


def test_a_record_says_all_that_a_launcher_needs(bundle: Path) -> None:
    files = read_bundle(bundle)
    variant = files.manifest.variants["nvidia-sm90"]
    used = {
        name
        for block in blocks(bundle).values()
        for program in block["programs"].values()
        for entry in program["kernels"].values()
        for _, name in entry["choices"]
    }
    assert files.json(variant["kernels"][variant["sampler"]])["op"] == "sample"
    assert used | {variant["sampler"]} == set(variant["kernels"])
    for name, path in variant["kernels"].items():
        assert path == f"kernels/nvidia-sm90/{name}/kernel.json"
        record = files.json(path)
        folder = path.removesuffix("kernel.json")
        assert files.bytes(folder + record["source"]).decode() == render_stamp(record["stamp"])
        plan = plan_from_json(record["plan"], path)
        for launch, binary in zip(plan.launches, record["binaries"], strict=True):
            assert files.bytes(folder + binary["file"])[:4] == b"\x7fELF"
            assert binary["shared_bytes"] <= SM90.limits.shared_bytes
            assert launch.arguments


def test_the_plan_of_a_node_fits_what_the_graph_gives_it(bundle: Path) -> None:
    files = read_bundle(bundle)
    variant = files.manifest.variants["nvidia-sm90"]
    checked = 0
    for block in blocks(bundle).values():
        graph = from_json(block["graph"])
        for program, found in block["programs"].items():
            for node in (n for n in graph.graph.nodes if n.name in found["kernels"]):
                call = call_of(node, program)
                assert call is not None
                for _, name in found["kernels"][node.name]["choices"]:
                    plan = plan_from_json(files.json(variant["kernels"][name])["plan"], name)
                    check_operands(name, plan, tensors_of(call.arguments))
                    checked += 1
    assert checked > 10


def test_the_same_model_gives_the_same_bytes(llama: Any, bundle: Path, tmp_path: Path) -> None:
    dc.build(llama, tmp_path / "again", target="nvidia-sm90")
    one, two = read_bundle(bundle).manifest, read_bundle(tmp_path / "again").manifest
    kernels = {name: e.sha256 for name, e in one.files.items() if name.startswith("kernels/")}
    assert kernels
    assert kernels == {name: e.sha256 for name, e in two.files.items() if name.startswith("kernels/")}
    text = b"".join((bundle / name).read_bytes() for name in kernels)
    assert str(Path.home()).encode() not in text
    assert b"/tmp/" not in text


@pytest.mark.slow
def test_routers_and_experts_have_kernels_in_every_program(tmp_path: Path) -> None:
    """And what a router's linear is given is not cast, nor are rotary tables made of small operations."""
    model = models.make("deepseek_v3", dtype=torch.bfloat16, num_hidden_layers=2, first_k_dense_replace=1)
    dc.build(model, tmp_path / "moe", target="nvidia-sm90")
    files = read_bundle(tmp_path / "moe")
    variant = files.manifest.variants["nvidia-sm90"]
    found: dict[str, set[str]] = {}
    entries: dict[str, set[str]] = {}
    for path in variant["blocks"].values():
        for program, block in files.json(path)["programs"].items():
            for entry in block["kernels"].values():
                found.setdefault(entry["op"], set()).add(program)
                for _, name in entry["choices"]:
                    record = files.json(variant["kernels"][name])
                    entries.setdefault(entry["op"], set()).update(n["entry"] for n in record["plan"]["launches"])
            left = {e["op"] for e in block["left"].values()}
            assert not {"deepinfer.route", "deepinfer.experts", "aten._to_copy", "aten.cos", "aten.matmul"} & left
    for name in ("route", "experts", "wide_linear", "rotary_table"):
        assert found[f"deepinfer.{name}"] == {"prefill", "decode", "verify"}
    assert entries["deepinfer.rotary_table"] == {"rotary_table"}
    assert "linear" in entries["deepinfer.wide_linear"]
    assert entries["deepinfer.experts"] == {"count", "place", "up", "down", "combine"}
    assert entries["deepinfer.route"] == {"route"}


def test_inspect_shows_kernels_and_what_is_left(bundle: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(bundle)])
    assert done.exit_code == 0, done.output
    for line in (
        "nvidia-sm90: native, 3 blocks, needs device cuda, capability [9, 0]",
        "Kernels of nvidia-sm90",
        "decode: layer0 cached_attention_default: paged_attention",
        "decode: logits sample: sample",
        "decode, verify: layer0 add_rms_norm_default: rms_norm",
        "  more tokens: block_m=16 block_n=64 pieces=1 num_warps=4 num_stages=2; ",
        "float32 products are torch's",
        "aten.linear",
    ):
        assert line in done.stdout
    found = json.loads(CliRunner().invoke(app, ["inspect", str(bundle), "--json"]).stdout)["kernels"]
    attention = next(r for r in found if r["program"] == "decode" and r.get("kernel") == "paged_attention")
    assert attention["choices"][-1]["tokens"] is None
    assert [n["entry"] for n in attention["choices"][0]["launches"]] == ["write_rows", "attend", "merge"]
    assert [n["entry"] for n in attention["choices"][-1]["launches"]] == ["write_rows", "attend"]
    assert all(n["registers"] > 0 for n in attention["choices"][0]["launches"])
    one = attention["choices"][0]["work"]
    # a key and a value of 16 elements for each of 4096 positions and 2 key heads, read once, and little else
    moved = 4096 * 2 * 32 * 4 * one["tokens"]
    assert moved < one["bytes"] < 1.01 * moved
    assert one["seconds"] == one["bytes"] / SM90.limits.read_bytes
    assert "us at best" in done.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of weights that are worth launches of ours, alone or together."""
    model = models.make("llama", num_hidden_layers=1, hidden_size=768, intermediate_size=1000).to(torch.bfloat16)
    out = tmp_path_factory.mktemp("gpu") / "large.bundle"
    dc.build(model, out, target="nvidia-sm90", dtype="bfloat16")
    return out


def test_siblings_are_one_call_of_few_tokens_and_the_librarys_of_more(large: Path) -> None:
    """Key and value are too small alone."""
    files = read_bundle(large)
    variant = files.manifest.variants["nvidia-sm90"]
    found = []
    for digest, block in blocks(large).items():
        graph, stored = from_json(block["graph"]), files.json(f"programs/blocks/{digest}.json")
        assert "deepinfer.linears" not in {n.get("target") for n in stored["nodes"]}
        for name, program in block["programs"].items():
            for node in graph.graph.nodes:
                entry = program["kernels"].get(node.name)
                if entry is None or entry["op"] != "deepinfer.linears":
                    continue
                call = call_of(node, name)
                assert call is not None
                assert [upto for upto, _ in entry["choices"]] == [1, 4, None]
                assert entry["choices"][-1][1] == "library"
                for _, kernel in entry["choices"][:-1]:
                    plan = plan_from_json(files.json(variant["kernels"][kernel])["plan"], kernel)
                    check_operands(kernel, plan, tensors_of(call.arguments))
                found.append((name, [w.shape[0] for w in call.arguments["weights"]]))
    assert len({n for n, _ in found}) == len(files.manifest.programs)
    assert sorted(widths for name, widths in found if name == "decode") == [[768, 256, 256], [1000, 1000]]


def test_inspect_shows_merged_linears(large: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(large)])
    assert done.exit_code == 0, done.output
    assert "layer0 linears_default: linears" in done.stdout
    assert "more tokens: by torch, whose library is as fast there or faster" in done.stdout
    rows = json.loads(CliRunner().invoke(app, ["inspect", str(large), "--json"]).stdout)["kernels"]
    row = next(r for r in rows if r.get("kernel") == "linears" and r["program"] == "decode")
    assert [n["entry"] for n in row["choices"][0]["launches"]] == ["linears"]
    assert row["choices"][0]["work"]["bytes"] == 2 * (769 * 1280 + 768)  # weights and results, the token once
    assert not [r for r in rows if "left" in r and r["op"] in ("deepinfer.linears", "aten.linear")]


def test_graphs_of_a_bundle_with_merged_linears_run(large: Path) -> None:
    assert bundle_tokens(dc.load(large, native=False), prompts(lengths=(5,)), 2)


def test_bnd_3_without_a_gpu_the_variant_is_refused_and_graphs_still_run(
    llama: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for target in ("nvidia-sm90", None):
        with pytest.raises(WrongTarget) as caught:
            dc.load(bundle, target=target)
        text = str(caught.value)
        assert "built for nvidia-sm90, a cuda device of capability 9.0" in text
        assert "offers no cuda device that torch can use" in text
        assert "native=False" in text
    given = prompts(lengths=(5,))
    llm: Any = dc.load(bundle, native=False)
    assert llm.engine._executor.draw is None
    assert bundle_tokens(llm, given, 4) == [eager_tokens(llama, given[0], 4)]


def test_tokens_are_chosen_by_the_kernel_that_does_so_or_on_the_host(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cubins, "Cubin", lambda files, path, device: path)
    files = read_bundle(bundle)
    variant = files.manifest.variants["nvidia-sm90"]

    def draw(**changes: Any) -> Any:
        return loading._Runners(files, read_programs(files), {**variant, **changes}, torch.device("cpu")).draw()

    assert draw().kernel == variant["kernels"][variant["sampler"]]
    older = {key: held for key, held in variant.items() if key != "sampler"}
    assert loading._Runners(files, read_programs(files), older, torch.device("cpu")).draw() is None
    assert draw(sampler="") is None
    other = next(name for name in variant["kernels"] if name != variant["sampler"])
    with pytest.raises(BundleCorrupt, match="to choose tokens, and it does something else"):
        draw(sampler=other)
    with pytest.raises(BundleCorrupt, match="names the kernel 'lost'"):
        draw(sampler="lost")


def a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_bnd_3_another_gpu_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, (8, 0))
    with pytest.raises(WrongTarget, match=r"of capability 8\.0"):
        dc.load(bundle, target="nvidia-sm90")


def test_the_right_gpu_without_the_launcher_names_the_extra(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingExtra, match=r"deepinfer-compile\[nvidia\]"):
        dc.load(bundle, target="nvidia-sm90")


def test_a_changed_byte_of_a_cubin_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "copy")
    victim = next((tmp_path / "copy" / "kernels").rglob("*.cubin"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(BundleCorrupt, match=r"\.cubin"):
        dc.load(tmp_path / "copy", native=False)


def test_the_cpu_variant_is_picked_wherever_it_stands(llama: Any, tmp_path: Path) -> None:
    dc.build(llama, tmp_path / "two", target=("nvidia-sm90", "cpu"))
    variants = read_bundle(tmp_path / "two").manifest.variants
    assert list(variants) == ["nvidia-sm90", "cpu"]
    given = prompts(lengths=(5, 30))
    wanted = [eager_tokens(llama, p, 8) for p in given]
    for target in (None, "cpu"):
        assert bundle_tokens(dc.load(tmp_path / "two", target=target), given, 8) == wanted
    assert in_fresh_process(tmp_path / "two", "native", given)["tokens"] == wanted
    with pytest.raises(WrongTarget, match=r"load\(target='cpu'\)"):
        dc.load(tmp_path / "two", target="nvidia-sm90")


def test_a_bundle_without_native_code_names_both_targets(llama: Any, tmp_path: Path) -> None:
    dc.build(llama, tmp_path / "x", target=("cpu", "nvidia-sm100"), native=False)
    assert {n: v["native"] for n, v in read_bundle(tmp_path / "x").manifest.variants.items()} == {
        "cpu": False,
        "nvidia-sm100": False,
    }
    assert bundle_tokens(dc.load(tmp_path / "x", target="nvidia-sm100"), prompts(lengths=(3,)), 2)


def test_what_is_missing_is_said_in_words(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SM90.missing() is None
    with monkeypatch.context() as patch:
        patch.setattr(nvidia.metadata, "version", lambda name: "3.5.1")
        assert "triton 3.5.1 is older than 3.6" in str(SM90.missing())
    with monkeypatch.context() as patch:
        patch.setattr(nvidia.platform, "machine", lambda: "aarch64")
        assert "Linux aarch64" in str(SM90.missing())
    with monkeypatch.context() as patch:
        patch.setattr(triton_compiler, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "t.py")))
        assert "comes without ptxas and cuobjdump" in str(SM90.missing())
    monkeypatch.setattr(triton_compiler, "find_spec", lambda name: None)
    with pytest.raises(TargetUnavailable, match="triton is not installed"):
        dc.build(llama, tmp_path / "x", target="nvidia-sm90")
    assert not (tmp_path / "x").exists()


def test_only_the_worker_imports_triton() -> None:
    root = Path(dc.__file__).parent
    importing = {
        file.name
        for folder in (root, *(root / name for name in ("passes", "targets", "templates")))
        for file in folder.resolve().rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "triton" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton")
    }
    assert importing == {"triton_worker.py"}
    assert {"cpu", "nvidia-sm90", "nvidia-sm100"} <= set(TARGETS)


def test_a_default_that_does_not_fit_gives_way_to_the_nearest_that_does(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much memory a kernel takes is the compiler's decision, and its versions decide differently."""
    whole = triton_compiler.TritonCompiler.compile

    def compile_(self: Any, kernel: Any) -> Path:
        if kernel.spec.name == "paged_attention" and kernel.config.num_stages == 2:
            raise KernelTooLarge(what_="kernel", target="t", entry="attend", needed=9, limit=8)
        return whole(self, kernel)

    monkeypatch.setattr(triton_compiler.TritonCompiler, "compile", compile_)
    files = dc.build(llama, tmp_path / "bundle", target="nvidia-sm90")
    records = [files.json(p) for p in files.manifest.variants["nvidia-sm90"]["kernels"].values()]
    found = [r["config"] for r in records if r["kernel"] == "paged_attention"]
    assert found
    assert all(c["num_stages"] != 2 for c in found)
    assert any("the nearest configuration that fits" in n for n in files.manifest.variants["nvidia-sm90"]["notes"])


def test_a_kernel_that_fits_in_no_configuration_is_an_error(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(self: Any, kernel: Any) -> Path:
        raise KernelTooLarge(what_="kernel", target="t", entry="attend", needed=9, limit=8)

    monkeypatch.setattr(triton_compiler.TritonCompiler, "compile", compile_)
    with pytest.raises(KernelTooLarge, match="attend takes 9 bytes of shared memory of 8"):
        dc.build(llama, tmp_path / "bundle", target="nvidia-sm90")
    assert not (tmp_path / "bundle").exists()
