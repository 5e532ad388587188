"""More of the error catalogue (`errors.py`): between ranks that read prompts and ranks that decode."""

from __future__ import annotations

from deepinfer_compile.errors import CompileError


class HandoverMismatch(CompileError):
    what = "no cache rows go from rank to rank: {field} is {one!r} on rank {first} and {other!r} on rank {second}"
    hint = "load the same bundle with the same max_model_len on all ranks; nothing was handed over"
    exit_code = 8
