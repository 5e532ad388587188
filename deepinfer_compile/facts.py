"""Facts: what is known to hold of a program between passes. Passes declare which they need, make and break.

A fact is a promise that the verifier can check, not a label: `verify.py` holds the check beside each one that has one.
"""

from __future__ import annotations

from enum import Enum


class Fact(Enum):
    """One property of a whole program."""

    SHAPES = "every value has a known shape and dtype"
    FUNCTIONAL = "no call writes to an operand"
    CANONICAL = "no assertions, no-op views or device constants are left"
    RAISED = "known blocks are dialect ops"
    POSITIONS = "token positions come from the input, not from row numbers"
    ROWWISE = "no op outside the dialect mixes tokens"
    CACHED = "attention reads and writes paged caches"
    FORMS = "every latent attention has its form chosen"
    FUSED = "fusions that every target takes are done"
    LOWERED = "every call has an implementation on the target"
