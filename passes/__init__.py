"""Placeholder docstring."""

if __name__ != "deepinfer_compile.passes":
    raise ImportError("import deepinfer_compile.passes; 'passes' at the repository root is the same package by another name")
