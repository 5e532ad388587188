"""Shapes files of a sweep: what cannot be measured is refused in words, before anything is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_compile.errors import BadOption, BadShapes
from deepinfer_compile.sweep import Sweep
from deepinfer_compile.sweep_shapes import read_shapes
from deepinfer_compile.tuning import Store
from tests.sweeping import FakeMachine, FakeTimer, spec_of

SHAPES = Path(__file__).parent.parent / "bench" / "shapes"
GOOD = (
    '[{"op": "linear", "params": {"terms": 20, "lines": 6, "dtype": "float32", "biased": true, "align": 4, '
    '"chosen": false, "wide": false}, "tokens": [2], "new": 1, "context": 9}]'
)
BROKEN = (
    (GOOD, "", "not valid JSON"),
    (GOOD, "[]", "is not a list of 1 entries or more"),
    (GOOD, "{}", "is not a list"),
    (GOOD, '[{"tokens": [1]}]', "lacks the key 'params'"),
    (GOOD, '[{"op": "linear", "params": {}, "tokens": [1]}]', "lacks terms, lines, dtype, biased, align, chosen, wide"),
    ('"lines"', '"rows"', "lacks lines and has the unknown rows"),
    ("20", '"20"', "params.terms is '20', not of type int"),
    ("20", "[1, [2]]", "params.terms is '[1, [2]]', not of type int"),
    ("true", "1", "params.biased is '1', not of type bool"),
    ("true", "null", "params.biased null is no value"),
    ('"float32"', '"floaty"', "params.dtype"),
    ('"float32"', '{"dtype": 1}', "params.dtype"),
    ("float32", "float16", "does not compute in torch.float16"),
    ("float32", "int32", "cannot be converted to type"),
    ('"terms": 20', '"terms": 0', "a weight of 6 x 0"),
    ('"align": 4', '"align": 3', "no graph gives these params: a graph would give Params("),
    ("[2]", "[0]", "tokens[0] is not a whole number from 1"),
    ("[2]", "[]", "is not a list of 1 entries"),
    ("[2]", "[2, 2]", "2 tokens are there twice"),
    ('"new": 1', '"new": 3', "tokens has 2, no multiple of 3"),
    ('"context": 9', '"context": 0', "context is not a whole number from 1"),
    ('"new": 1, "context": 9', '"new": 2, "context": 1', "context is 1, less than 2 new tokens"),
    ('"op": "linear"', '"op": "experts"', "op names none of the template's operations"),
    ('"new"', '"sizes": 1, "new"', "has the unknown key 'sizes'"),
    ('"lines": 6', '"lines": 10000000', "its operands take"),
)


@pytest.mark.parametrize(("old", "new", "reason"), BROKEN)
def test_shapes_that_cannot_be_measured(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in GOOD
    file = tmp_path / "shapes.json"
    file.write_text(GOOD.replace(old, new))
    machine = FakeMachine(dtypes=(torch.float32, torch.int32))
    sweep = Sweep(machine, FakeTimer(lambda c: 1.0), Store(tmp_path / "s"), file=str(file))
    with pytest.raises(BadShapes) as caught:
        list(sweep.run(read_shapes("linear", file)))
    assert reason in str(caught.value)
    assert str(file) in str(caught.value)
    assert "try:" in str(caught.value)
    assert not list((tmp_path / "s").glob("*.json"))


def test_an_entry_is_a_bucket_for_each_number_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(GOOD.replace("[2]", "[2, 8]").replace('"new": 1', '"new": 2'))
    one, two = read_shapes("linear", file)
    assert (one.requests, two.requests) == (((1, 2, 9),), ((4, 2, 9),))
    assert two.case().new == (2, 2, 2, 2)
    assert two.case().lengths == (9, 9, 9, 9)
    assert one.params == spec_of("linear").params(20, 6, torch.float32, True, 4)


def test_the_files_of_the_benchmark_are_shapes_of_their_kernels(tmp_path: Path) -> None:
    for file in SHAPES.glob("*.json"):
        template = file.stem.removesuffix("_whole")
        shapes = read_shapes(template, file)
        assert all(sum(c * n for c, n, _ in s.requests) == s.tokens for s in shapes)
        sweep = Sweep(FakeMachine(most_bytes=1 << 20), FakeTimer(lambda c: 1.0), Store(tmp_path), file=str(file))
        with pytest.raises(BadShapes, match="its operands take"):
            list(sweep.run(shapes))


def test_what_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadShapes, match="cannot be read"):
        read_shapes("linear", tmp_path / "none.json")
    file = tmp_path / "norm.json"
    file.write_text('[{"params": {}, "tokens": [1]}]')
    with pytest.raises(BadShapes, match=r"op is needed.*\n.*rms_norm, add_rms_norm"):
        read_shapes("rms_norm", file)
    with pytest.raises(BadOption, match=r"no kernel has that name\n.*linear"):
        read_shapes("cpu_linear", "default")


def test_nothing_to_measure_is_an_error(tmp_path: Path) -> None:
    sweep = Sweep(FakeMachine(dtypes=()), FakeTimer(lambda c: 1.0), Store(tmp_path))
    with pytest.raises(BadShapes, match="none of them is for a device of tests; left out: rms_norm, 1 token"):
        list(sweep.run(read_shapes("rms_norm", "default")))


def test_own_cases_leave_out_what_is_too_large(tmp_path: Path) -> None:
    sweep = Sweep(FakeMachine(dtypes=(torch.float32,)), FakeTimer(lambda c: 1.0), Store(tmp_path))
    found = list(sweep.run(read_shapes("rms_norm", "default")))
    cases = [c for s in (spec_of("rms_norm"), spec_of("add_rms_norm")) for c in s.cases]
    assert len(found) == sum(c.params.dtype == torch.float32 for c in cases)
    assert len(sweep.notes) == len(cases) - len(found)
    assert all("does not compute in torch.bfloat16" in note for note in sweep.notes)


SEVERAL = (
    '[{"params": {"terms": 20, "lines": [6, 3], "dtype": "float32", "biased": [true, false], "align": 4}, '
    '"tokens": [2]}]'
)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[6, 3]", "6", "params.lines is '6', not of type tuple"),
        ("[6, 3]", '[6, "a"]', "not of type tuple"),
        ("[6, 3]", "[6, true]", "not of type tuple"),
        ("[6, 3]", "[6, 3, 1]", "3 weights and 2 biases"),
        ("[true, false]", "[1, 0]", "params.biased is '[1, 0]', not of type tuple"),
    ],
)
def test_a_list_is_of_its_fields_kind(tmp_path: Path, old: str, new: str, reason: str) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(SEVERAL.replace(old, new))
    with pytest.raises(BadShapes) as caught:
        read_shapes("linears", file)
    assert reason in str(caught.value)


def test_several_weights_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(SEVERAL)
    machine = FakeMachine()
    (outcome,) = Sweep(machine, FakeTimer(lambda c: 1.0), Store(tmp_path / "s"), file=str(file)).run(
        read_shapes("linears", file)
    )
    assert len(outcome.bucket.measurements) == len(machine.seen) > 10
    assert not [m for m in outcome.bucket.measurements if m.rejected]
