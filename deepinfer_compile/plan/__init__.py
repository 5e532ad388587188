"""Predicts what a deployment over many ranks holds, takes and costs, from a model's config and a chip's description.

`read_shape` and `read_hardware` give what is known, `Request` says what is asked, `ledger` answers as data, `sections`
and `pages` as words. Closed forms only; `simulate` is what they are checked with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_compile.plan.hardware import Hardware as Hardware
    from deepinfer_compile.plan.ledger import ledger as ledger
    from deepinfer_compile.plan.ledger import sweep as sweep
    from deepinfer_compile.plan.reading import read_shape as read_shape
    from deepinfer_compile.plan.request import Request as Request

_HOMES = {
    "Hardware": "hardware",
    "Request": "request",
    "ledger": "ledger",
    "read_hardware": "hardware",
    "read_shape": "reading",
    "sweep": "ledger",
}


def __getattr__(name: str) -> Any:
    # a definition of ours imports `plan.shape`, so that nothing here may import the definitions
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["Hardware", "Request", "ledger", "read_hardware", "read_shape", "sweep"]
