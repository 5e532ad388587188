"""What a reader should know of how a program was captured, in words. Imports nothing: the command line starts here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {"traced_all_because": "all layers were traced", "one_block_because": "the model is one block"}


def split_remarks(programs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of programs whose upper half reads keys of the lower one, by the `info` of each: where they are cut, why, and
    what that saves in a prompt."""
    found = {name: info["split"] for name, info in programs.items() if "split" in info}
    if not found:
        return []
    first = next(iter(found.values()))
    where = "" if first["layer"] is None else f" at layer {first['layer']}"
    lines = [f"encoder-decoder, boundary{where}: {first['why']}"]
    for name, split in found.items():
        if "flops" not in split:
            continue
        every, wanted = split["flops"]
        part = wanted / max(1, every + wanted)
        lines.append(
            f"{name}: of {every + wanted:,} FLOPs of matrix products a token {wanted:,} ({part:.0%}) are spent on the "
            + (f"last {split['keep']} rows of a prompt" if split["keep"] else "rows whose logits are wanted only")
            + ("; exact" if split["exact"] else f"; an approximation, {split['halo']} rows would be exact")
        )
    return lines


def remarks(info: Mapping[str, Any]) -> list[str]:
    """A line for each remark of a program's `info`."""
    return [f"{words}: {info[key]}" for key, words in WORDS.items() if key in info]
