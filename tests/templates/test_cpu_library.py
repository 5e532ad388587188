"""The CPU kernel library as a file: how it is built and refused, what it depends on, and how it is traced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer_compile.errors import NativeBuildFailed, NoCompiler, TargetUnavailable
from deepinfer_compile.ops import cpu as cpu_ops
from deepinfer_compile.targets import cpu_kernels
from tests.cpu_library import isa, load

ROOT = Path(__file__).parents[2]


def test_record_names_what_a_process_must_match() -> None:
    record = json.loads((load().parent / cpu_kernels.RECORD).read_text())
    abi = torch.compiled_with_cxx11_abi()
    assert record == {"isa": isa(), "torch": torch.__version__, "cxx11_abi": abi, "namespace": "deepinfer_cpu"}


def test_rendered_sources_lie_beside_the_library() -> None:
    for name, text in cpu_kernels.render_kernels(isa()).items():
        assert (load().parent / name).read_text() == text
        assert text.startswith("// deepinfer cpu_")


def test_library_needs_torch_only_and_has_no_search_path() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(load())], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in dynamic
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    for runtime in ("gomp", "iomp", "libomp"):
        assert runtime not in dynamic


def test_one_openmp_runtime_in_the_process() -> None:
    """In a fresh process: what else a test process has loaded is not ours."""
    code = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]);"
        "torch.ops.deepinfer_cpu.linear(torch.zeros(2, 512), torch.zeros(512, 512), None);"
        "print(open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(load())], capture_output=True, text=True, check=True)
    mapped = {line.split()[-1] for line in done.stdout.splitlines() if "omp" in line}
    runtimes = {os.path.realpath(path) for path in mapped if any(n in path for n in ("gomp", "iomp", "libomp"))}
    assert len(runtimes) == 1, runtimes


def test_every_instruction_set_renders_and_others_are_refused() -> None:
    for name in cpu_kernels.ISAS:
        text = "".join(cpu_kernels.render_kernels(name).values())
        assert ("_mm512" in text) == (name == "x86-64-v4")
    with pytest.raises(TargetUnavailable, match="x86-64-v9"):
        cpu_kernels.render_kernels("x86-64-v9")


def test_host_isa_asks_for_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {name: " ".join(sorted(cpu_kernels._CPU_FLAGS[name])) for name in cpu_kernels.ISAS}
    machine = {
        f"flags\t: {flags['x86-64-v3']} {flags['x86-64-v4']}\n": "x86-64-v4",
        f"flags\t: {flags['x86-64-v3']} avx512f\n": "x86-64-v3",
    }
    for text, want in machine.items():
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert cpu_kernels.host_isa() == want
    monkeypatch.setattr(Path, "read_text", lambda self: "flags\t: avx2 bmi1\n")
    with pytest.raises(TargetUnavailable, match="fma"):
        cpu_kernels.host_isa()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo '#define __clang__ 1'; echo '#define __GNUC__ 4'", "clang"),
        ("echo '#define __GNUC__ 9'", "GCC 9"),
        ("exit 1", "does not run"),
        ("case $1 in -dM) echo '#define __GNUC__ 13';; *) echo libstdc++.so;; esac", "no shared C"),
    ],
)
def test_unfit_compilers_are_passed_over(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = cpu_kernels.find_compiler()
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    assert cpu_kernels.find_compiler() == usual
    assert re.search(reason, caplog.text)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(NoCompiler, match=reason):
        cpu_kernels.find_compiler()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match="not installed"):
        cpu_kernels.find_compiler()


def test_failed_compile_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_kernels, "render_kernels", lambda isa: {"bad.cpp": "#error no good\n"})
    with pytest.raises(NativeBuildFailed, match="no good") as caught:
        cpu_kernels.build_kernels(tmp_path / "out", isa())
    log = Path(str(caught.value.values["log"]))
    assert log.parent == tmp_path / "out"
    assert "no good" in log.read_text()


def test_fakes_carry_the_schemas_of_the_library() -> None:
    load()
    for name, schema in cpu_ops.SCHEMAS.items():
        overload = getattr(torch.ops.deepinfer_cpu, name).default
        assert str(overload._schema) == f"deepinfer_cpu::{schema}"


def test_schemas_come_from_python_where_the_library_is_absent() -> None:
    code = (
        "import torch; from deepinfer_compile.ops.cpu import register_fakes; register_fakes(); register_fakes();"
        "x = torch.zeros(3, 8, device='meta');"
        "a, b = torch.ops.deepinfer_cpu.linears(x, [x, x[:2]], [None, None]); print(tuple(a.shape), tuple(b.shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "(3, 3) (3, 2)"


class Block(torch.nn.Module):
    """One call of every operation, on shapes that depend on T."""

    def forward(self, x: Tensor, w: Tensor, kv: Tensor, latent: Tensor, meta: list[Tensor], ex: list[Tensor]) -> Tensor:
        ops = torch.ops.deepinfer_cpu
        q, k = ops.linears(x, [w, w[:16]], [None, None])
        y = ops.cached_attention(
            q.view(-1, 2, 16), k.view(-1, 1, 16), k.view(-1, 1, 16), kv, *meta, 0.25, 0, 0.0, None
        ).flatten(1)
        heads = y.view(-1, 2, 16)
        z = ops.cached_latent_attention(
            heads[..., :12], heads[..., 12:], k[:, :8], k[:, 8:12], ex[2], ex[3], latent, *meta, 0.25, "absorbed"
        )
        y = ops.linear(y, w, w[0]) + z.flatten(1).repeat(1, 2)
        own = k.view(-1, 1, 16)
        written = ops.write_kv(own, own, kv, meta[3])
        shared = ops.shared_attention(q.view(-1, 2, 16), kv, *meta[:3], written, 0.25, 0, 0.0, None, 16)
        y = y + shared.flatten(1)
        streams = y.view(-1, 2, 16)
        _, post, comb = ops.mix_streams(streams, w[:8], w[0, :8], w[0, :3], 1e-6, 3, 1e-6)
        y = ops.join_streams(streams, streams[:, 0], post, comb).flatten(1)
        ids = torch.zeros(y.shape[0], 1, dtype=torch.int32)
        return ops.experts(y, ids, ids.float() + 1, ex[0], ex[1], None, None, "silu", 0.0, 0.0, False, False) + y


def block_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    meta = [
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
        torch.arange(64, 64 + tokens),
    ]
    experts = [random(2, 10, 32), random(2, 32, 5), random(2, 12, 8), random(2, 8, 8)]
    return random(tokens, 32), random(32, 32), random(2, 2, 64, 1, 16), random(2, 64, 12), meta, experts


def exported() -> torch.export.ExportedProgram:
    load()
    tokens = torch.export.Dim("tokens", min=1, max=64)
    shapes = ({0: tokens}, None, None, None, [None, None, None, {0: tokens}], [None] * 4)
    return torch.export.export(Block(), block_inputs(5), dynamic_shapes=shapes, strict=False).run_decompositions({})


def test_export_keeps_every_operation_and_both_mutations() -> None:
    program = exported()
    text = str(program.graph)
    for name in cpu_ops.SCHEMAS:
        assert f"deepinfer_cpu.{name}.default" in text
    assert len(program.graph_signature.user_inputs_to_mutate) == 2
    for tokens in (1, 9):
        plain, traced = block_inputs(tokens), block_inputs(tokens)
        torch.testing.assert_close(program.module()(*traced), Block()(*plain))
        assert torch.equal(plain[2], traced[2])
        assert torch.equal(plain[3], traced[3])
        assert not torch.equal(plain[2], block_inputs(tokens)[2])


@pytest.mark.slow
def test_aot_inductor_calls_every_operation(tmp_path: Path) -> None:
    package = torch._inductor.aoti_compile_and_package(exported(), package_path=str(tmp_path / "block.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for tokens in (1, 9, 64):
        plain, aot = block_inputs(tokens), block_inputs(tokens)
        torch.testing.assert_close(compiled(*aot), Block()(*plain))
        assert torch.equal(plain[2], aot[2])
        assert torch.equal(plain[3], aot[3])


@pytest.mark.slow
@pytest.mark.parametrize("other", [name for name in cpu_kernels.ISAS if name < isa()])
def test_narrower_instruction_sets_pass_the_same_tests(other: str) -> None:
    files = [f"tests/templates/test_cpu_{name}.py" for name in ("linear", "attention", "latent", "experts", "streams")]
    environment = {**os.environ, "DEEPINFER_TEST_ISA": other}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
