"""Triton sources to cubins on a machine without a GPU: the files, the record, the cache, and what goes wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.errors import KernelTooLarge, NativeBuildFailed
from deepinfer_compile.kernel_ops import load_source
from deepinfer_compile.kernels import AnySpec, Case, fields_of, render_stamp, specs
from deepinfer_compile.runtime.launch import EARLY, plan_from_json
from deepinfer_compile.targets import triton_compiler
from deepinfer_compile.targets.nvidia import SM90, SM100, NvidiaTarget
from deepinfer_compile.targets.triton_compiler import RECORD, SOURCE, Kernel, TritonCompiler

TRITON = metadata.version("triton")
CUDA_ELF = 190


def compiler(target: NvidiaTarget, cache: Path, shared_bytes: int | None = None) -> TritonCompiler:
    arch = target.capability[0] * 10 + target.capability[1]
    return TritonCompiler(target.name, arch, shared_bytes or target.limits.shared_bytes, TRITON, cache)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonCompiler]:
    with compiler(SM90, tmp_path_factory.mktemp("cache")) as made:
        yield made


def kernel(op: str, case: str, tokens: int = 64, target: NvidiaTarget = SM90) -> Kernel:
    spec = next(s for s in specs() if s.op.name == op)
    found: Case[Any] = next(c for c in spec.cases if c.name == case)
    return Kernel.of(spec, found.params, spec.default(found.params, target.limits, tokens))


def elf_architecture(data: bytes) -> tuple[int, int]:
    """Machine of an ELF file, and the compute capability (90 for 9.0) in its flags."""
    assert data[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", data, 18)
    (flags,) = struct.unpack_from("<I", data, 48)
    return machine, flags >> 8 & 0xFF if data[8] >= 8 else flags & 0xFF


@pytest.mark.parametrize(
    "op",
    [
        "rms_norm",
        "add_rms_norm",
        "cached_attention",
        "experts",
        "route",
        "sample",
        "linears",
        "write_rows",
        "cached_recent",
        "cached_select_rows",
        "pack_rows",
        "unpack_rows",
        "mix_streams",
        "join_streams",
        "collapse_streams",
        "balance_streams",
        "partial_rope",
    ],
)
def test_typical_cubins_are_for_the_architecture_and_fit(op: str, hopper: TritonCompiler) -> None:
    wanted = kernel(op, "typical")
    folder = hopper.compile(wanted)
    record = jsonio.loads((folder / RECORD).read_bytes())
    assert (folder / SOURCE).read_text() == wanted.text == render_stamp(record["stamp"])
    assert (record["triton"], record["target"], record["op"]) == (TRITON, "nvidia-sm90", op)
    plan = plan_from_json(record["plan"], RECORD)
    assert plan == wanted.plan
    assert record["config"] == fields_of(wanted.config)
    assert len(record["binaries"]) == len(plan.launches)
    for launch, binary in zip(plan.launches, record["binaries"]):
        data = (folder / binary["file"]).read_bytes()
        assert elf_architecture(data) == (CUDA_ELF, 90)
        assert binary["symbol"].encode() in data
        assert binary["arch"] == "sm_90a"
        assert binary["num_warps"] == launch.options["num_warps"]
        assert binary["threads"] == 32 * binary["num_warps"]
        assert 0 < binary["registers"] <= 255
        assert binary["stack_bytes"] == 0, "registers spill"
        assert binary["hidden_pointers"] == 2
        assert binary["global_scratch_bytes"] == 0
    assert sorted(f.name for f in folder.iterdir()) == sorted(
        [RECORD, SOURCE, *(binary["file"] for binary in record["binaries"])]
    )


def test_a_long_prompt_is_expanded_and_attended_without_spilling(hopper: TritonCompiler) -> None:
    """The launch that reads the cache keeps sums of a whole latent row; it spills little, some of it in its loops."""
    spec = next(s for s in specs() if s.name == "latent_prefill")
    params = next(c.params for c in spec.cases if c.name == "long")
    record = jsonio.loads(
        (hopper.compile(Kernel.of(spec, params, spec.default(params, SM90.limits, 8192))) / RECORD).read_bytes()
    )
    stacks = {launch["entry"]: b["stack_bytes"] for launch, b in zip(record["plan"]["launches"], record["binaries"])}
    assert stacks.pop("look_back") < 1024
    assert stacks == dict.fromkeys(("write", "expand", "attend", "absorb", "merge"), 0)


@pytest.mark.parametrize(("tokens", "most"), [(1, 0), (64, 256)])
def test_attention_over_chosen_rows_hardly_spills(tokens: int, most: int, hopper: TritonCompiler) -> None:
    """Tiles of all heads keep sums of whole latents, and an address for every row of a list."""
    record = jsonio.loads(
        (hopper.compile(kernel("cached_selected_attention", "typical", tokens)) / RECORD).read_bytes()
    )
    stacks = {launch["entry"]: b["stack_bytes"] for launch, b in zip(record["plan"]["launches"], record["binaries"])}
    assert stacks.pop("attend") <= most
    assert stacks == {"store": 0, "merge": 0}


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_launch_for_several_weights_needs_what_one_for_a_weight_does(tokens: int, hopper: TritonCompiler) -> None:
    """At the typical sizes, a token: 120 registers a thread for two weights and 118 for one; four: 68 for both."""
    several = kernel("linears", "typical", tokens)
    spec = next(s for s in specs() if s.op.name == "linear")
    one = Kernel.of(spec, several.params.each()[0], several.config)
    needs = [jsonio.loads((hopper.compile(k) / RECORD).read_bytes())["binaries"][0] for k in (several, one)]
    assert needs[0]["registers"] <= needs[1]["registers"] + 4
    assert needs[0]["stack_bytes"] == needs[1]["stack_bytes"] == 0
    assert needs[0]["shared_bytes"] == needs[1]["shared_bytes"]


def test_another_architecture_is_another_file(tmp_path: Path) -> None:
    with compiler(SM100, tmp_path) as made:
        folder = made.compile(kernel("rms_norm", "heads", target=SM100))
        assert elf_architecture((folder / "rms_norm.cubin").read_bytes()) == (CUDA_ELF, 100)


def test_the_cache_answers_the_second_time_and_bytes_do_not_depend_on_the_place(
    hopper: TritonCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = kernel("rms_norm", "128")
    folder = hopper.compile(wanted)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with compiler(SM90, tmp_path / "elsewhere") as other:
        copy = other.compile(wanted)
        assert other.name(wanted) == hopper.name(wanted)
    assert copy != folder
    for file in folder.iterdir():
        assert file.read_bytes() == (copy / file.name).read_bytes()
    monkeypatch.setattr(TritonCompiler, "_start", lambda self: pytest.fail("a cached kernel was compiled again"))
    assert compiler(SM90, tmp_path / "elsewhere").compile(wanted) == copy


def test_what_the_code_depends_on_is_in_the_key(hopper: TritonCompiler) -> None:
    wanted = kernel("cached_attention", "block")
    keys = {hopper.name(wanted)}
    keys.add(hopper.name(Kernel.of(wanted.spec, wanted.params, replace(wanted.config, num_warps=2))))
    keys.add(hopper.name(Kernel.of(wanted.spec, replace(wanted.params, scale=0.5), wanted.config)))
    keys.add(hopper.name(replace(wanted, text=wanted.text + "\n")))
    keys.add(replace(hopper, version="0.0.0").name(wanted))
    keys.add(replace(hopper, arch=80).name(wanted))
    assert len(keys) == 6


def failing(text: str) -> Kernel:
    return replace(kernel("rms_norm", "128"), text=text)


def test_a_source_that_does_not_compile_is_an_error_with_its_log(hopper: TritonCompiler) -> None:
    good = kernel("rms_norm", "128")
    for text, reason in (
        (good.text.replace("tl.rsqrt", "tl.no_such_function"), "no_such_function"),
        (good.text.replace("def rms_norm(\n", "def rms_norm(\n    extra,\n"), "its plan gives"),
        ("import no_such_module\n", "no_such_module"),
    ):
        with pytest.raises(NativeBuildFailed, match=reason) as caught:
            hopper.compile(failing(text))
        assert "kernel rms_norm with Config(rows=1" in str(caught.value)
        log = caught.value.values["log"]
        assert isinstance(log, Path)
        assert (log / SOURCE).read_text() == text
    assert hopper.compile(good)


def test_a_compiler_that_dies_or_hangs_is_an_error_and_the_next_kernel_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiler(SM90, tmp_path) as made:
        with pytest.raises(NativeBuildFailed, match="code 7"):
            made.compile(failing("import os\nprint('last words')\nos._exit(7)\n"))
        with monkeypatch.context() as patch:
            patch.setattr(triton_compiler, "LIMIT_S", 0.3)
            with pytest.raises(NativeBuildFailed, match=r"limit 0\.3 s"):
                made.compile(failing("import time\ntime.sleep(60)\n"))
        assert made.compile(kernel("rms_norm", "128"))


def test_too_much_shared_memory_is_an_error(tmp_path: Path) -> None:
    with (
        compiler(SM90, tmp_path, shared_bytes=1024) as made,
        pytest.raises(KernelTooLarge, match=r"attend takes \d+ bytes of shared memory of 1024"),
    ):
        made.compile(kernel("cached_attention", "one", tokens=4096))


@pytest.mark.slow
@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda t: t.name)
@pytest.mark.parametrize("spec", [pytest.param(s, id=s.op.name) for s in specs()])
def test_legal_configs_compile_and_fit(spec: AnySpec, target: NvidiaTarget, tmp_path: Path) -> None:
    """Defaults of every case, and of the largest case configs from all over the space."""
    with compiler(target, tmp_path) as made:
        for case in spec.cases:
            for tokens in (1, 4096):
                made.compile(Kernel.of(spec, case.params, spec.default(case.params, target.limits, tokens)))
        space = list(spec.space(spec.cases[-1].params, target.limits))
        for config in space[:: max(1, len(space) // 12)]:
            made.compile(Kernel.of(spec, spec.cases[-1].params, config))


EARLY_STARTS = [
    ("linear", "row", "linear"),
    ("linear", "single", "linear"),
    ("linears", "row", "linears"),
    ("output_projection", "single", "linear"),
    ("cached_latent_attention", "typical", "absorb"),
]


@pytest.mark.parametrize(("op", "case", "entry"), EARLY_STARTS)
def test_what_starts_early_waits_before_it_reads_results_or_writes(op: str, case: str, entry: str) -> None:
    """In the order of the machine's instructions: weights, the wait, then what the launch before may have made."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wanted = kernel(op, case, tokens=1)
    launch = next(x for x in wanted.plan.launches if x.entry == entry)
    assert launch.options[EARLY] == 1
    function = getattr(load_source(wanted.text), entry)
    source = ASTSource(fn=function, signature={a.name: a.type for a in launch.arguments}, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options)).asm["ptx"]
    before, waits, after = made.partition("griddepcontrol.wait")
    assert waits
    assert "griddepcontrol.wait" not in after
    assert "ld.global" in before
    assert "ld.global" in after
    assert "st.global" not in before
    assert "atom" not in before


def test_only_what_waits_starts_early() -> None:
    for spec in specs():
        for case in spec.cases:
            given = spec.default(case.params, SM90.limits, 1) if "triton" in spec.sources else None
            if given is None:
                continue
            made = Kernel.of(spec, case.params, given)
            for launch in made.plan.launches:
                body = made.text.partition(f"def {launch.entry}(")[2].partition("@triton.jit")[0]
                assert ("gdc_wait" in body) == bool(launch.options.get(EARLY)), (spec.op.name, case.name, launch.entry)
