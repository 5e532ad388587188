"""Rendering is strict: exact names, plain data, a first line that says how to do it again."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

import deepinfer_compile.render as render_module
from deepinfer_compile.render import names_of, render


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment = render_module._environment().overlay(loader=jinja2.FileSystemLoader(tmp_path))
    monkeypatch.setattr(render_module, "_environment", lambda: environment)
    return tmp_path


def test_first_line_is_the_stamp(templates: Path) -> None:
    (templates / "a.cpp.j2").write_text("int a = {{ size }};\n")
    (templates / "a.py.j2").write_text("a = {{ size }}\n")
    first, rest = render("a.cpp.j2", size=3).split("\n", 1)
    assert rest == "int a = 3;\n"
    head, digest = first.rsplit(" ", 1)
    assert head == '// deepinfer a.cpp.j2 {"size": 3}'
    assert len(digest) == 16
    assert render("a.py.j2", size=3).startswith("# deepinfer a.py.j2 ")


def test_stamp_follows_text_and_included_text(templates: Path) -> None:
    (templates / "a.h.j2").write_text("{% include 'b.h.j2' %}{{ x }}")
    (templates / "b.h.j2").write_text("{{ y }}")
    assert names_of("a.h.j2") == {"x", "y"}
    before = render("a.h.j2", x=1, y=2).split("\n")[0]
    (templates / "b.h.j2").write_text("{{ y }};")
    after = render("a.h.j2", x=1, y=2).split("\n")[0]
    assert before != after
    assert before.rsplit(" ", 1)[0] == after.rsplit(" ", 1)[0]


def test_missing_and_unknown_values_are_errors(templates: Path) -> None:
    (templates / "a.h.j2").write_text("{% if x %}{{ y }}{% endif %}")
    with pytest.raises(ValueError, match=r"missing values \['y'\]"):
        render("a.h.j2", x=False)
    with pytest.raises(ValueError, match=r"unknown values \['z'\]"):
        render("a.h.j2", x=False, y=1, z=1)


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, lambda: 1, (1, [2])])
def test_values_are_plain_data(value: object, templates: Path) -> None:
    (templates / "a.h.j2").write_text("{{ x }}")
    with pytest.raises(TypeError, match="plain data"):
        render("a.h.j2", x=value)  # type: ignore[arg-type]


def test_attributes_that_do_not_exist_are_errors(templates: Path) -> None:
    (templates / "a.h.j2").write_text("{{ x.missing }}")
    with pytest.raises(jinja2.UndefinedError):
        render("a.h.j2", x=1)


@pytest.mark.parametrize("name", ["a.cpp", "a.txt.j2", "a"])
def test_only_templates_of_known_languages(name: str) -> None:
    with pytest.raises(ValueError, match="known language"):
        render(name)


def test_an_include_chosen_at_run_time_is_refused(templates: Path) -> None:
    (templates / "a.h.j2").write_text("{% include x %}")
    with pytest.raises(ValueError, match="literally"):
        render("a.h.j2", x="b.h.j2")
