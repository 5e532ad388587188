"""What a reader should know of how a program was captured, in words. Imports nothing: the command line starts here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {"traced_all_because": "all layers were traced", "one_block_because": "the model is one block"}


def remarks(info: Mapping[str, Any]) -> list[str]:
    """A line for each remark of a program's `info`."""
    return [f"{words}: {info[key]}" for key, words in WORDS.items() if key in info]
