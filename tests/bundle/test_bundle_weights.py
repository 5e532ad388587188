"""Planning, tied names, reloading in place, and whole bundles of weights (CAP-6)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_compile.bundle import (
    BundleWriter,
    DictSource,
    Ledger,
    Manifest,
    WeightItem,
    WeightSource,
    constants_table,
    execute,
    plan_weights,
    read_bundle,
    reload_into,
    split_shards,
    weight_items,
)
from deepinfer_compile.errors import BundleCorrupt, MissingWeight, TiedWeightConflict, WeightMismatch
from tests.bundle.support import checkpoint, write_bundle

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLE = torch.arange(21, dtype=torch.float32).reshape(7, 3)
TIED_WANTED = {EMBED: (torch.float32, (7, 3)), HEAD: (torch.float32, (7, 3))}


# -- planning ---------------------------------------------------------------------------------------------------------


def test_direct_cast_and_ignored(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", {"a": TABLE, "b": TABLE.half(), "more": torch.zeros(1)})
    ledger = plan_weights({"a": (torch.bfloat16, (7, 3)), "b": (torch.float16, (7, 3))}, source)
    assert ledger.recipes == {
        "a": {"op": "cast", "to": "bfloat16", "of": {"op": "copy", "of": "a"}},
        "b": {"op": "copy", "of": "b"},
    }
    assert ledger.ignored == ("more",)
    assert "1 tensors" in ledger.notes[0]
    assert Ledger.from_json(ledger.to_json()) == ledger


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ((torch.float32, (3, 7)), r"float32\[7, 3\]"),
        ((torch.int32, (7, 3)), "float32"),
        ((torch.float32, (21,)), r"float32\[7, 3\]"),
    ],
)
def test_other_shape_or_kind_is_refused(tmp_path: Path, spec: tuple, found: str) -> None:
    source = checkpoint(tmp_path / "hf", {"a": TABLE})
    with pytest.raises(WeightMismatch, match=f"'a'.*expected.*found {found}"):
        plan_weights({"a": spec}, source)


def test_missing_weight(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", {"a": TABLE})
    with pytest.raises(MissingWeight, match="'b'"):
        plan_weights({"a": (torch.float32, (7, 3)), "b": (torch.float32, (1,))}, source)
    with pytest.raises(MissingWeight, match="embed"):
        plan_weights(TIED_WANTED, source, [set(TIED_WANTED)])


def test_rename_and_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", {"net.a": TABLE})
    wanted = {"wrapped.a": (torch.float32, (7, 3)), "rope": (torch.float32, (2,))}
    ledger = plan_weights(wanted, source, rename=[(r"^wrapped\.", "net.")], kept=["rope"])
    assert ledger.recipes == {"wrapped.a": {"op": "copy", "of": "net.a"}}
    assert ledger.kept == ("rope",)


def test_two_possible_names_are_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", {"x.a": TABLE, "y.a": TABLE})
    with pytest.raises(WeightMismatch, match=r"x\.a and y\.a"):
        plan_weights({"z.a": (torch.float32, (7, 3))}, source, rename=[("^z", "x"), ("^z", "y")])


def experts(count: int) -> dict[str, torch.Tensor]:
    parts = {"gate_proj": (4, 3), "up_proj": (4, 3), "down_proj": (3, 4)}
    return {f"m.experts.{e}.{p}.weight": torch.randn(shape) for e in range(count) for p, shape in parts.items()}


def test_experts(tmp_path: Path) -> None:
    wanted = {"m.experts.gate_up_proj": (torch.float32, (3, 8, 3)), "m.experts.down_proj": (torch.float32, (3, 3, 4))}
    tensors = experts(3)
    source = checkpoint(tmp_path / "hf", tensors)
    ledger = plan_weights(wanted, source)
    out = execute(ledger.recipe("m.experts.gate_up_proj"), source)
    for e in range(3):
        assert torch.equal(out[e, :4], tensors[f"m.experts.{e}.gate_proj.weight"])
        assert torch.equal(out[e, 4:], tensors[f"m.experts.{e}.up_proj.weight"])
    for key in ("m.experts.1.up_proj.weight", "m.experts.2.down_proj.weight", "m.experts.0.gate_proj.weight"):
        rest = {name: tensor for name, tensor in tensors.items() if name != key}
        with pytest.raises(MissingWeight, match=key):
            plan_weights(wanted, checkpoint(tmp_path / "hf", rest))
    with pytest.raises(WeightMismatch, match="3 experts"):
        plan_weights(wanted, checkpoint(tmp_path / "hf", experts(4)))


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)})
    with pytest.raises(WeightMismatch, match=r"a\.weight"):
        plan_weights({"a.weight": (torch.bfloat16, (4, 4))}, source)
    ledger = plan_weights({"a.weight": (torch.float8_e4m3fn, (4, 4))}, source)
    assert ledger.recipes["a.weight"] == {"op": "copy", "of": "a.weight"}


def test_fp8_resident_weights_and_scales_are_copied(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 2)}
    source = checkpoint(tmp_path / "hf", tensors)
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert plan_weights(wanted, source).recipes == {name: {"op": "copy", "of": name} for name in tensors}


@pytest.mark.parametrize(("scale", "block"), [((2, 2), [2, 2]), ((4, 1), [1, 4]), ((1, 1), [4, 4]), ((1,), [4, 4])])
def test_block_from_the_grid(tmp_path: Path, scale: tuple[int, ...], block: list[int]) -> None:
    tensors = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(scale)}
    ledger = plan_weights({"a.weight": (torch.float32, (4, 4))}, checkpoint(tmp_path / "hf", tensors))
    assert ledger.recipes["a.weight"]["block"] == block
    assert ledger.recipes["a.weight"]["layout"] == "row"


def test_block_that_does_not_fit(tmp_path: Path) -> None:
    weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
    for grid, config in (
        ((3, 3), "{}"),
        ((2, 3), '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 3]}}'),
    ):
        source_dir = tmp_path / "hf"
        source_dir.mkdir(exist_ok=True)
        (source_dir / "config.json").write_text(config)
        source = checkpoint(source_dir, {"a.weight": weight, "a.weight_scale_inv": torch.ones(grid)})
        with pytest.raises(WeightMismatch, match="scale_inv"):
            plan_weights({"a.weight": (torch.float32, (4, 6))}, source)


def test_packed_fp4_experts(tmp_path: Path) -> None:
    weight = torch.randint(-128, 128, (4, 32), dtype=torch.int8)
    scale = torch.randint(120, 130, (4, 2), dtype=torch.uint8)
    source = checkpoint(tmp_path / "hf", {"a.weight": weight, "a.scale": scale})
    ledger = plan_weights({"a.weight": (torch.bfloat16, (4, 64))}, source)
    assert ledger.recipes["a.weight"] == {"op": "mxfp4", "blocks": "a.weight", "scales": "a.scale"}
    assert execute(ledger.recipe("a.weight"), source).shape == (4, 64)


def test_tensors_in_memory_are_planned_alike(tmp_path: Path) -> None:
    source = DictSource({EMBED: TABLE, HEAD: TABLE})
    ledger = plan_weights(TIED_WANTED, source, [(EMBED, HEAD)])
    assert list(ledger.recipes) == [EMBED]
    write_bundle(tmp_path / "b", TIED_WANTED, ledger, source, WeightSource())
    assert torch.equal(read_bundle(tmp_path / "b").weights()[HEAD], TABLE)


def test_reading_bundles_imports_no_compiler() -> None:
    """A server reads bundles; what builds them must not come along."""
    code = "import sys, deepinfer_compile.bundle as b; print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("transformers", "triton", "jinja2", "deepinfer_compile.passes", "deepinfer_compile.capture"):
        assert f"'{name}'" not in found


# -- CAP-6 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[EMBED], [HEAD], [EMBED, HEAD]])
@pytest.mark.parametrize("mode", ["copy", "link", "none"])
def test_CAP_6_one_stored_copy_and_one_object(tmp_path: Path, names: list[str], mode: str) -> None:
    source = checkpoint(tmp_path / "hf", dict.fromkeys(names, TABLE))
    ledger = plan_weights(TIED_WANTED, source, [{HEAD, EMBED}])
    assert ledger.tied == ((EMBED, HEAD),)
    folder = str(tmp_path / "hf") if mode == "link" else ""
    write_bundle(tmp_path / "b", TIED_WANTED, ledger, source, WeightSource(mode, folder))
    files = read_bundle(tmp_path / "b", check="full")
    assert files.ledger() == ledger
    stored = sum(path.stat().st_size for path in (tmp_path / "b").glob("weights/*"))
    assert stored < 2 * TABLE.nbytes + 400 if mode == "copy" else stored == 0
    weights = files.weights(tmp_path / "hf" if mode == "none" else None)
    assert weights[EMBED] is weights[HEAD]
    assert torch.equal(weights[HEAD], TABLE)
    assert set(weights) == {EMBED, HEAD}


def test_CAP_6_bundle_grows_by_one_matrix(tmp_path: Path) -> None:
    big = torch.randn(100, 50)
    wanted = dict.fromkeys((EMBED, HEAD), (torch.float32, (100, 50)))
    source = checkpoint(tmp_path / "hf", {EMBED: big, HEAD: big})
    sizes = {}
    for tied in ([], [(EMBED, HEAD)]):
        ledger = plan_weights(wanted, source, tied)
        write_bundle(tmp_path / "b", wanted, ledger, source, WeightSource())
        sizes[len(tied)] = sum(path.stat().st_size for path in (tmp_path / "b" / "weights").iterdir())
    assert abs(sizes[0] - sizes[1] - big.nbytes) < 200


def test_CAP_6_different_values_are_a_conflict(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", {EMBED: TABLE, HEAD: TABLE + 1})
    with pytest.raises(TiedWeightConflict, match=f"{EMBED} and {HEAD}"):
        plan_weights(TIED_WANTED, source, [(EMBED, HEAD)])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", [[EMBED], [HEAD], [EMBED, HEAD]])
def test_CAP_6_updates_reach_both_consumers(tmp_path: Path, names: list[str], shared: bool) -> None:
    """The bundle was planned from a checkpoint with one name; updates come with either name or both."""
    ledger = plan_weights(TIED_WANTED, checkpoint(tmp_path / "hf", {EMBED: TABLE}), [(EMBED, HEAD)])
    held = torch.full((7, 3), float("nan"))
    live = {EMBED: held, HEAD: held if shared else held.clone()}
    ids = torch.tensor([1, 2])
    for step in (1.0, 2.0):
        update = dict.fromkeys(names, TABLE * step)
        reload_into(live, ledger, DictSource(update))
        logits = live[EMBED][ids] @ live[HEAD].t()
        assert torch.equal(logits, (TABLE * step)[ids] @ (TABLE * step).t())
    before = held.clone()
    with pytest.raises(TiedWeightConflict):
        reload_into(live, ledger, DictSource({EMBED: TABLE, HEAD: TABLE + 1}))
    assert torch.equal(held, before)


# -- whole bundles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "link", "none"])
def test_derived_weights(tmp_path: Path, mode: str) -> None:
    """A constant of the program is stored in every mode, the rest only when copied."""
    wanted = {"m.experts.down_proj": (torch.bfloat16, (2, 3, 4)), "rope": (torch.float32, (2,))}
    tensors = experts(2)
    source = checkpoint(tmp_path / "hf", tensors)
    ledger = plan_weights(wanted, source, kept=["rope"])
    folder = str(tmp_path / "hf") if mode == "link" else ""
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_weights("constants", [WeightItem.of("rope", torch.tensor([1.0, 2.0]))])
        if mode == "copy":
            writer.add_weights("model", weight_items(ledger, source))
        writer.add_json("ledger.json", ledger.to_json())
        writer.finish(Manifest({}, {}, constants=constants_table(wanted), weights=WeightSource(mode, folder)))
    weights = read_bundle(tmp_path / "b", check="full").weights(tmp_path / "hf" if mode == "none" else None)
    expected = torch.stack([tensors[f"m.experts.{e}.down_proj.weight"] for e in range(2)]).to(torch.bfloat16)
    assert torch.equal(weights["m.experts.down_proj"], expected)
    assert weights["rope"].tolist() == [1, 2]
    if mode != "copy":
        checkpoint(tmp_path / "hf", {**tensors, "m.experts.1.down_proj.weight": torch.zeros(4, 3)})
        with pytest.raises(WeightMismatch):
            read_bundle(tmp_path / "b").weights(tmp_path / "hf")


def test_shards(tmp_path: Path) -> None:
    items = [WeightItem.of(name, torch.zeros(size)) for name, size in (("a", 10), ("b", 10), ("c", 100), ("d", 1))]
    shards = split_shards(items, 100)
    assert [(name, [item.name for item in items]) for name, items in shards] == [
        ("model-00001-of-00003", ["a", "b"]),
        ("model-00002-of-00003", ["c"]),
        ("model-00003-of-00003", ["d"]),
    ]
    assert split_shards([], 100) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"recipes": [], "tied": [], "kept": [], "ignored": [], "notes": []},
        {"recipes": {"a": {"op": "x"}}, "tied": [], "kept": [], "ignored": [], "notes": []},
        {"recipes": {}, "tied": [["a", "b"]], "kept": [], "ignored": [], "notes": []},
        {"recipes": {}, "tied": [[]], "kept": [], "ignored": [], "notes": []},
        {"recipes": {}, "tied": [], "kept": [1], "ignored": [], "notes": []},
        {"recipes": {}, "tied": [], "kept": [], "ignored": [], "notes": [], "more": 1},
    ],
)
def test_ledgers_from_files_are_checked(value: object) -> None:
    with pytest.raises(BundleCorrupt, match="ledger"):
        Ledger.from_json(value)


def _peak_kb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError


def test_memory_is_about_one_output(tmp_path: Path) -> None:
    """Stacked, joined and dequantised experts of 64 MiB: anonymous memory grows by the result and little more."""
    source = checkpoint(
        tmp_path / "hf",
        {f"{p}{e}": torch.ones(512, 512).to(torch.float8_e4m3fn) for p in "gu" for e in range(64)}
        | {f"s{e}": torch.ones(4, 4) for e in range(64)},
    )

    def part(name: str, e: int) -> dict:
        return {"op": "fp8_block", "of": f"{name}{e}", "scale": f"s{e}", "block": [128, 128], "layout": "row"}

    each = [{"op": "concat", "dim": 0, "of": [part("g", e), part("u", e)]} for e in range(64)]
    recipe = {"op": "cast", "to": "bfloat16", "of": {"op": "stack", "of": each, "dim": 0}}
    seen: list[int] = []
    before = _peak_kb()
    real = torch.Tensor.copy_

    def watched(self: torch.Tensor, *args: object) -> torch.Tensor:
        seen.append(_peak_kb())
        return real(self, *args)

    torch.Tensor.copy_ = watched  # type: ignore[method-assign]
    try:
        out = execute(recipe, source)
    finally:
        torch.Tensor.copy_ = real  # type: ignore[method-assign]
    assert out.nbytes == 64 << 20
    assert max(seen) - before < 1.35 * (64 << 10)
