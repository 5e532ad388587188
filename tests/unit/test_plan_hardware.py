"""Descriptions of hardware: every value has a public source, files are checked, exchanges go through their points."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepinfer_compile.errors import BadOption
from deepinfer_compile.plan.alltoall import few_tokens, many_tokens
from deepinfer_compile.plan.hardware import CONSTANTS, known, read_hardware

SMALL = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
LARGE = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}
"""Microseconds of 128 tokens, and GB/s of 4096, of width 7168 and top-8, as published."""


def test_every_constant_has_a_source() -> None:
    assert known() == ["ascend-950", "b200", "gb200", "h200", "h800"]
    for name in known():
        chip = read_hardware(name)
        assert chip.values.keys() == CONSTANTS.keys()
        for constant, source in chip.sources.items():
            assert re.search(r"https://|README|this package|none published", source), (name, constant)
        for points in (chip.small, chip.large):
            assert points is None or points.source.startswith("https://")


def test_published_exchanges_come_out_as_published() -> None:
    chip = read_hardware("h800")
    for ranks, (out, back) in SMALL.items():
        found = few_tokens(chip, ranks, 128, 7168, 8)
        assert (found.out, found.back) == pytest.approx((out * 1e-6, back * 1e-6))
        assert found.by == "a published point"
    # the published rates are these bytes over these times, to the precision of the table
    found = few_tokens(chip, 8, 128, 7168, 8)
    assert (round(found.out_bytes / 77e-6 / 1e9), round(found.back_bytes / 114e-6 / 1e9)) == (98, 129)
    # forty layers of them are 19.5 ms, more than four tokens' time at 240 a second
    found = few_tokens(chip, 64, 128, 7168, 8)
    assert round(40 * (found.out + found.back) * 1e3, 1) == 19.5
    for ranks, (out, back) in LARGE.items():
        sent = many_tokens(chip, ranks, 4096, 7168, 8, spread=4)
        assert sent.out_bytes / (sent.out - chip["latency"]) == pytest.approx(out * 1e9)
        assert sent.back_bytes / (sent.back - chip["latency"]) == pytest.approx(back * 1e9)


def test_between_and_beyond_points() -> None:
    chip = read_hardware("h800")
    near = [few_tokens(chip, n, 128, 7168, 8).out for n in (64, 90, 128, 4096)]
    assert near[0] < near[1] < near[2] < near[3] == few_tokens(chip, 256, 128, 7168, 8).out
    assert few_tokens(chip, 90, 128, 7168, 8).by == "between published points"
    assert few_tokens(chip, 4096, 128, 7168, 8).by == "the nearest published point of 8 to 256"
    assert few_tokens(chip, 4, 128, 7168, 8).by == "rates of the links, inside a domain"
    assert few_tokens(chip, 1, 128, 7168, 8).out == 0


def write(folder: Path, change: Any) -> str:
    raw = json.loads((Path(read_hardware.__code__.co_filename).parent / "hardware" / "h800.json").read_text())
    change(raw)
    file = folder / "mine.json"
    file.write_text(json.dumps(raw))
    return str(file)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    def faster(raw: dict[str, Any]) -> None:
        raw["name"], raw["small"] = "mine", None
        raw["constants"]["read_bytes"] = {"value": 9e12, "source": "measured here"}

    chip = read_hardware(write(tmp_path, faster))
    assert (chip.name, chip["read_bytes"], chip.small) == ("mine", 9e12, None)
    changed = chip.with_({"latency": 1e-6})
    assert (changed["latency"], changed.sources["latency"], changed.changed) == (1e-6, "given", ("latency",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw["constants"].pop("latency"), "latency .* must be an object with value and source"),
        (lambda raw: raw["constants"].update(latency=1e-6), "latency .* must be an object"),
        (lambda raw: raw["constants"].update(latncy={"value": 1, "source": "x"}), "near it is latency"),
        (lambda raw: raw["constants"]["read_bytes"].update(value=0), "above 0"),
        (lambda raw: raw["constants"]["memory_fraction"].update(value=1.5), "above 0 to 1"),
        (lambda raw: raw["constants"]["latency"].update(value=-1), "a number from 0"),
        (lambda raw: raw["constants"]["latency"].update(value="1"), "a number from 0"),
        (lambda raw: raw["small"].update(points=[[8, 1, 1], [4, 1, 1]]), "in rising order"),
        (lambda raw: raw["small"].pop("tokens"), "of how many tokens"),
        (lambda raw: raw["large"].update(points=[]), "large must have"),
        (lambda raw: raw.pop("constants"), "no object `constants`"),
    ],
)
def test_a_wrong_file(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(BadOption, match=words):
        read_hardware(write(tmp_path, change))


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="did you mean h200"):
        read_hardware("H20O")
    with pytest.raises(BadOption, match="use one of ascend-950"):
        read_hardware("zzz")
    with pytest.raises(BadOption, match="did you mean read_bytes"):
        read_hardware("h200").with_({"read_byte": 1.0})
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BadOption, match="not JSON"):
        read_hardware(str(tmp_path / "x.json"))
    with pytest.raises(OSError, match=r"none\.json"):
        read_hardware(str(tmp_path / "none.json"))
