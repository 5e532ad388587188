"""Values, stamps and launch plans of the kernel contract: what cannot be said exactly is refused by name."""

from __future__ import annotations

import ast
import enum
import json
import math
import struct
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import deepinfer_compile.render as render_module
from deepinfer_compile import kernels, ops
from deepinfer_compile.cli import app
from deepinfer_compile.errors import BadStamp, BundleCorrupt, KernelOperand, StaleStamp
from deepinfer_compile.kernels import Call, Refused, alignment, call_of, render_kernel, render_stamp, select, specs
from deepinfer_compile.render import parse_stamp, python_literal, render
from deepinfer_compile.runtime.launch import (
    Argument,
    Buffer,
    Launch,
    LaunchPlan,
    Operand,
    buffer_bytes,
    check_operands,
    evaluate,
    plan_from_json,
    plan_to_json,
    tensors_of,
    values_of,
)
from tests.golden_text import FOLDER, kernel_golden

ODD = [math.inf, -math.inf, math.nan, -0.0, 1e-45, 5e-324, 2**31, 2**63 - 1, -(2**70), True, False, 0.1, 1e308, ""]
NORM = next(s for s in specs() if s.op is ops.RMS_NORM)


def same(a: Any, b: Any) -> bool:
    """Equal down to type and sign of zero; NaN equals NaN, whatever its payload."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def read_back(text: str) -> Any:
    """The value that a rendered constant has; `tl` gives types by name."""
    tl = type("tl", (), {"bfloat16": torch.bfloat16, "float8e4nv": torch.float8_e4m3fn})
    space: dict[str, Any] = {"tl": tl}
    exec(text, space)
    return space["x"]


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment = render_module._environment().overlay(loader=jinja2.FileSystemLoader(tmp_path))
    monkeypatch.setattr(render_module, "_environment", lambda: environment)
    (tmp_path / "one.py.j2").write_text("x = {{ value }}\n")
    return tmp_path


@pytest.mark.parametrize("value", [*ODD, "a'b\"c\n{{ x }} # {% raw %} \\ \u2028é", (1, (2.5, "x")), (), (math.nan,)])
def test_gen_5_values_survive(value: Any, templates: Path) -> None:
    text = render("one.py.j2", value=value)
    assert same(read_back(text), value)
    assert len(ast.parse(text).body) == 1, "a value is data only"
    assert render("one.py.j2", value=value) == text
    assert same(render_module.decode(parse_stamp(text.split("\n")[0])[1]["value"]), value)
    assert render_stamp(text.split("\n")[0]) == text


@pytest.mark.parametrize("value", [torch.bfloat16, torch.float8_e4m3fn])
def test_gen_5_dtypes_become_tritons(value: torch.dtype, templates: Path) -> None:
    text = render("one.py.j2", value=value)
    assert read_back(text) is value
    assert render_stamp(text.split("\n")[0]) == text


_Point = namedtuple("_Point", "x y")
_Colour = enum.Enum("_Colour", "RED")
_Number = enum.IntEnum("_Number", "ONE")
_Text = type("_Text", (str,), {})


@pytest.mark.parametrize(
    "value",
    [_Point(1, 2), _Colour.RED, _Number.ONE, _Text("a"), torch.complex64, torch.float64, None, [1], {}, 1j, b"a", len],
)
def test_gen_5_anything_else_is_refused_by_name(value: Any, templates: Path) -> None:
    with pytest.raises(TypeError, match=r"one\.py\.j2: value 'value'"):
        render("one.py.j2", value=value)


@pytest.mark.parametrize("value", [1.5, math.inf, 2**63, "a b", "x;y", 'a"', torch.float32])
def test_gen_5_cpp_takes_whole_numbers_and_words(value: Any, templates: Path) -> None:
    (templates / "one.cpp.j2").write_text("auto x = {{ value }};\n")
    with pytest.raises(TypeError, match="value 'value'"):
        render("one.cpp.j2", value=value)
    assert render("one.cpp.j2", value=True).endswith("auto x = true;\n")
    assert render("one.cpp.j2", value=2**63 - 1).endswith("auto x = 9223372036854775807;\n")


plain = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(plain)
@settings(max_examples=200, deadline=None)
def test_gen_5_any_plain_value_reads_back(value: Any) -> None:
    assert same(read_back(f"x = {python_literal(value)}"), value)
    assert same(render_module.decode(json.loads(json.dumps(render_module.encode(value), allow_nan=False))), value)


def test_stamps_print_the_same_source_again() -> None:
    for spec in specs():
        case = spec.cases[0]
        config = next(spec.space(case.params, kernels.Limits((), "cuda", 1 << 20, 1, 32)))
        text = render_kernel(spec, case.params, config, "triton")
        assert render_stamp(text.split("\n")[0]) == text
        template, data, digest = parse_stamp(text.split("\n")[0])
        assert template == spec.template("triton")
        assert data.keys() == {"params", "config"}
        assert digest == render_module.digest(template)


def _stamp() -> str:
    params = NORM.cases[0].params
    return render_kernel(NORM, params, NORM.config(1, 1), "triton").split("\n")[0].removeprefix("# ")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda s: "hello", BadStamp, "deepinfer TEMPLATE"),
        (lambda s: s.replace("{", "{{", 1), BadStamp, "not JSON"),
        (lambda s: s.replace("rms_norm/", "no_such/"), BadStamp, "no template"),
        (lambda s: s.replace("rms_norm/", "../rms_norm/"), BadStamp, "no template"),
        (lambda s: s[:-1] + ("0" if s[-1] != "0" else "1"), StaleStamp, "another version"),
        (lambda s: s.replace('"rows": 1', '"rows": null'), BadStamp, "null"),
        (lambda s: s.replace('"rows": 1', '"rows": {"float": "x"}'), BadStamp, "no value"),
        (lambda s: s.replace('"rows"', '"lines"'), BadStamp, "lines"),
        (lambda s: s.replace('"size": 1', '"size": 0'), BadStamp, "0 elements"),
    ],
)
def test_other_stamps_are_refused(change: Callable[[str], str], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        render_stamp(change(_stamp()))


def test_the_command_prints_a_source_from_a_stamp_or_a_file(tmp_path: Path) -> None:
    text = render_stamp(_stamp())
    (tmp_path / "kernel.py").write_text(text)
    for given_ in (_stamp(), f"# {_stamp()}", str(tmp_path / "kernel.py")):
        done = CliRunner().invoke(app, ["render", given_])
        assert (done.exit_code, done.stdout) == (0, text)
    done = CliRunner().invoke(app, ["render", str(tmp_path / "nothing.py")])
    assert done.exit_code == BadStamp.exit_code
    assert "not the stamp" in done.stderr


def test_goldens_begin_with_a_stamp_that_still_renders() -> None:
    for spec in specs():
        text = (FOLDER / f"{kernel_golden(spec)}.txt").read_text()
        assert text.startswith(render_stamp(text.split("\n")[0]))


def test_a_template_must_name_what_it_gets_and_print_its_stamp(templates: Path) -> None:
    (templates / "rms_norm").mkdir()
    names = sorted(render_module.encode_values("", kernels.fields_of(NORM.cases[0].params)))
    body = "".join(f"{name} = {{{{ {name} }}}}\n" for name in [*names, "rows", "num_warps", "pdl"])
    file = templates / "rms_norm" / "triton.py.j2"
    file.write_text("# {{ stamp }}\n" + body)
    arguments = (NORM, NORM.cases[0].params, NORM.config(1, 1), "triton")
    assert render_kernel(*arguments).count("\n") == len(names) + 4
    file.write_text("# {{ stamp }}\n" + body + "{{ extra }}")
    with pytest.raises(ValueError, match="extra"):
        render_kernel(*arguments)
    file.write_text("# {{ stamp }}\n" + body.replace("rows = {{ rows }}\n", ""))
    with pytest.raises(ValueError, match="rows"):
        render_kernel(*arguments)
    for head in ("", "\n# {{ stamp }}\n"):
        file.write_text(head + body)
        with pytest.raises(ValueError, match="first line"):
            render_kernel(*arguments)


def norm_call(x: torch.Tensor, **changes: Any) -> Call:
    usual = {"x": x, "weight": x.new_ones(x.shape[-1]), "eps": 1e-6, "offset": 0.0, "cast_first": True}
    return Call(ops.RMS_NORM, {**usual, **changes}, "decode")


def test_what_a_kernel_does_not_take_is_refused_with_the_reason() -> None:
    half = torch.ones(2, 8, dtype=torch.float16)
    for call, reason in (
        (norm_call(half), "float16"),
        (norm_call(torch.ones(2, 8), weight=half[0]), "weight of torch.float16"),
        (norm_call(torch.ones(2, 8), weight=torch.ones(8, dtype=torch.bfloat16)), "weight"),
        (norm_call(torch.ones(8, 2).t()), "side by side"),
        (norm_call(torch.ones(2, 2, 2, 8)), "two"),
        (norm_call(torch.ones(1, 40000)), "longer"),
        (Call(ops.COMPLEX_ROPE_TABLE, {}, "decode"), "no kernel template"),
    ):
        found = select(call, "triton")
        assert isinstance(found, Refused)
        assert reason in found.reason
    assert isinstance(select(norm_call(torch.ones(2, 8)), "assembler"), Refused)
    attention = next(s for s in specs() if s.op is ops.CACHED_ATTENTION)
    given_ = attention.inputs(attention.cases[1], torch.Generator())
    for phase, changes, reason in (
        ("decode", {"kv": given_["kv"].double()}, "cache"),
        ("decode", {"v": torch.ones(3, 2, 300)}, "wider"),
        ("decode", {"q": given_["q"].transpose(1, 2)}, "'q'"),
    ):
        refused = attention.bind(Call(ops.CACHED_ATTENTION, {**given_, **changes}, phase))
        assert isinstance(refused, Refused)
        assert reason in refused.reason


def test_a_call_has_the_arguments_of_its_node_by_name() -> None:
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.ones(2, 8), torch.ones(8)
    node = graph.call_function(ops.RMS_NORM.overload, (x, w, 1e-5), {"offset": 1.0, "cast_first": False})
    call = call_of(node, "verify")
    assert call is not None
    assert call.arguments == {"x": x.meta["val"], "weight": w.meta["val"], "eps": 1e-5, "offset": 1.0,
                              "cast_first": False}  # fmt: skip
    assert call.phase == "verify"
    assert call_of(x, "verify") is None


@pytest.mark.parametrize("biased", [False, True])
def test_atens_linear_is_a_call_of_ours(biased: bool) -> None:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("x", "w", "b")[: 2 + biased]]
    for node, shape in zip(inputs, ((1, 2, 8), (4, 8), (4,))):
        node.meta["val"] = torch.ones(shape)
    call = call_of(graph.call_function(torch.ops.aten.linear.default, tuple(inputs)), "decode")
    assert call is not None
    assert call.op is ops.LINEAR
    held = [n.meta["val"] for n in inputs] + [None] * (not biased)
    assert call.arguments == dict(zip(("x", "weight", "bias"), held))
    params = next(s for s in specs() if s.op is ops.LINEAR).bind(call)
    assert not isinstance(params, Refused)
    assert (params.terms, params.lines, params.biased) == (8, 4, biased)


@pytest.mark.parametrize(("x", "weight"), [((8,), (4, 8)), ((2, 8), (8,)), ((3, 2, 8), (4, 8))])
def test_a_linear_of_other_sizes_than_rows_and_lines_is_refused(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    given = {"x": torch.ones(x), "weight": torch.ones(weight), "bias": None}
    assert isinstance(next(s for s in specs() if s.op is ops.LINEAR).bind(Call(ops.LINEAR, given, "decode")), Refused)


SEVERAL = next(s for s in specs() if s.op is ops.LINEARS)


def test_a_list_of_nodes_is_a_list_of_their_values() -> None:
    graph = torch.fx.Graph()
    x, v, w, b = (graph.placeholder(name) for name in "xvwb")
    for node, shape in zip((x, v, w, b), ((1, 2, 8), (4, 8), (3, 8), (3,))):
        node.meta["val"] = torch.ones(shape)
    call = call_of(graph.call_function(ops.LINEARS.overload, (x, [v, w], [None, b])), "decode")
    assert call is not None
    assert call.arguments["weights"] == [v.meta["val"], w.meta["val"]]
    assert call.arguments["biases"] == [None, b.meta["val"]]
    params = SEVERAL.bind(call)
    assert not isinstance(params, Refused)
    assert (params.terms, params.lines, params.biased) == (8, (4, 3), (False, True))
    assert list(tensors_of(call.arguments)) == ["x", "weights_0", "weights_1", "biases_1"]


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([torch.ones(4, 8)], "1 weights; give 2 to 3"),
        ([torch.ones(4, 8)] * 4, "4 weights; give 2 to 3"),
        ([torch.ones(4, 8), torch.ones(4, 8).bfloat16()], r"a weight of torch.bfloat16 for rows of torch.float32"),
        ([torch.ones(4, 8), torch.ones(8, 4).t()], "do not lie side by side"),
    ],
)
def test_weights_that_one_launch_does_not_take(weights: list[torch.Tensor], reason: str) -> None:
    given = {"x": torch.ones(2, 8), "weights": weights, "biases": [None] * len(weights)}
    refused = SEVERAL.bind(Call(ops.LINEARS, given, "decode"))
    assert isinstance(refused, Refused)
    assert reason in refused.reason


@pytest.mark.parametrize(("lines", "biased"), [((4,), (True,)), ((4, 0), (True, True)), ((4, 4), (True,))])
def test_params_of_several_weights_are_checked(lines: tuple[int, ...], biased: tuple[bool, ...]) -> None:
    with pytest.raises(ValueError, match="weights"):
        SEVERAL.params(8, lines, torch.float32, biased, 1)


def test_alignment_is_what_offsets_and_strides_prove() -> None:
    whole = torch.empty(4, 64)
    assert alignment(whole, None) == 16
    assert alignment(whole[:, 8:40]) == 8
    assert alignment(torch.empty(4, 36)) == 4
    assert alignment(torch.empty(4, 33)) == 1
    assert alignment(torch.empty(1, 33)) == 16
    assert alignment(whole, torch.empty(3, 2)) == 2


PLAN = LaunchPlan(
    operands=(Operand("x", "float32", (None, 4), packed=2), Operand("t", "int32", (None,))),
    results=(Buffer("out", "float32", (("size", "x", 0), 4)),),
    scratch=(Buffer("part", "bfloat16", (("mul", 3, ("cdiv", ("size", "x", 0), 2)),)),),
    launches=(
        Launch(
            "f",
            (("max", 1, ("add", ("size", "t", -1), ("min", 7, 2))),),
            (Argument("x", "*fp32", "x", 16), Argument("step", "i64", ("stride", "x", 0), 4)),
            {"num_warps": 4},
        ),
    ),
)


def test_plans_are_evaluated_on_operands() -> None:
    tensors = {"x": torch.ones(5, 4), "t": torch.ones(6, dtype=torch.int32)}
    check_operands("k", PLAN, tensors)
    assert evaluate(PLAN.launches[0].grid[0], tensors) == 8
    assert buffer_bytes(PLAN.scratch[0], tensors) == 9 * 2
    x, step = values_of("k", PLAN.launches[0], tensors)
    assert x is tensors["x"]
    assert step == 4
    assert plan_from_json(json.loads(json.dumps(plan_to_json(PLAN))), "f") == PLAN
    check_operands("k", PLAN, {**tensors, "x": torch.ones(1, 1, 5, 4)})


def test_a_single_row_may_lie_anywhere() -> None:
    """Its stride is what `alignment` does not count, so no promise can depend on it."""
    x = torch.ones(8)[:4].as_strided((1, 4), (7, 1))
    assert alignment(x) == 16
    assert values_of("k", PLAN.launches[0], {"x": x}) == [x, 0]
    assert evaluate(("stride", "x", 0), {"x": x.expand(3, 4)}) == 0
    assert evaluate(("stride", "x", -2), {"x": torch.ones(2, 4)}) == 4


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.ones(5, 4, dtype=torch.float64), r"float64\[5, 4\]"),
        (torch.ones(5, 3), r"float32\[any, 4\]"),
        (torch.ones(2, 5, 4), "given float32"),
        (torch.ones(4, 5).t(), "packed"),
        (torch.ones(5, 8)[:, :4], r"strides \[8, 1\]"),
        (torch.ones(4), "given float32"),
    ],
)
def test_gen_3_another_layout_is_refused_by_name(x: torch.Tensor, match: str) -> None:
    with pytest.raises(KernelOperand, match=match) as caught:
        check_operands("k", PLAN, {"x": x, "t": torch.ones(1, dtype=torch.int32)})
    assert "kernel k takes x" in str(caught.value)


def test_gen_3_broken_promises_are_refused_by_name() -> None:
    whole = torch.ones(30)
    for x, match in ((whole[1:21].view(5, 4), "'x' of f"), (whole.as_strided((5, 4), (6, 1)), "'step' of f")):
        with pytest.raises(KernelOperand, match=match):
            values_of("k", PLAN.launches[0], {"x": x})


@pytest.mark.parametrize(
    "change",
    [
        {"operands": [{"name": "x"}]},
        {"results": [{"name": "x", "dtype": "float32", "shape": [["system", "a", 1]]}]},
        {"scratch": [{"name": "x", "dtype": "float32", "shape": [1.5]}]},
        {"scratch": [{"name": "x", "dtype": "float32", "shape": [True]}]},
        {"launches": [{"entry": "f", "grid": [1], "options": {}, "arguments": [
            {"name": "a", "type": "*fp32", "value": 3, "multiple": 1}]}]},
        {"launches": [{"entry": "f", "grid": [1], "options": {}, "arguments": [
            {"name": "a", "type": "fp16", "value": 3, "multiple": 1}]}]},
        {"launches": 3},
    ],
)  # fmt: skip
def test_plans_that_are_none_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BundleCorrupt, match="launch plan"):
        plan_from_json({**plan_to_json(PLAN), **change}, "kernel.json")
