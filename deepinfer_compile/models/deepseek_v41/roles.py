"""The layer map for people: one line for each run of layers that read the same sources."""

from __future__ import annotations

from itertools import groupby

from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.layers import Role, boundary, layer_map


def table(config: DeepseekV41Config) -> tuple[dict[str, str], ...]:
    """A row for each run, column -> words. Raises BadModelConfig as `layer_map` does."""
    runs = groupby(layer_map(config), lambda role: (role.ratio, role.kv_source, role.index_source))
    return tuple(_row(config, list(run)) for _, run in runs)


def _row(config: DeepseekV41Config, run: list[Role]) -> dict[str, str]:
    first, last = run[0], run[-1]
    notes = [f"memory before layer {role.index}" for role in run if role.engram]
    notes += [f"layer {role.index} publishes candidates" for role in run if role.makes_candidates]
    if first.index == boundary(config):
        notes.append("boundary")
    return {
        "layers": f"{first.index}-{last.index}" if last is not first else str(first.index),
        "ratio": str(first.ratio),
        "window": str(config.sliding_window),
        "rows of layer": "-" if first.kv_source is None else str(first.kv_source),
        "chosen by layer": "-" if first.index_source is None else str(first.index_source),
        "notes": ", ".join(notes),
    }


__all__ = ["table"]
