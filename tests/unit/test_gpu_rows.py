"""The table of the GPU benchmarks: what is kept is what was measured, and misses are called so."""

from __future__ import annotations

from pathlib import Path

from tests.bench.gpu_rows import READ_CEILING, Rows, table


def test_sections_add_up_to_a_table(tmp_path: Path) -> None:
    first, second = Rows(), Rows()
    half = int(READ_CEILING * 50e-6)
    first.add("decode", "eager", 900.0)
    first.add("decode", "ours", 100.0, moved=half)
    first.add("decode", "ours, CUDA graphs", 80.0, moved=half)
    second.add("bundle", "ours", 70.0)
    first.save(tmp_path / "decode.json", {"gpu": "one"})
    second.save(tmp_path / "bundle.json", {"gpu": "one"})
    lines = table(tmp_path, {"decode": 85.0, "bundle": 60.0}).splitlines()
    assert lines[0] == '{"gpu": "one"}'
    assert "| decode | eager 900.0 | ours 100.0, CUDA graphs 80.0 | 11.25 | 62% of reads | 85 (met) |" in lines
    assert "| bundle |  | ours 70.0 |  |  | 60 (missed) |" in lines
    assert not list(tmp_path.glob("*.part"))
