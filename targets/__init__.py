"""Placeholder docstring."""

if __name__ != "deepinfer_compile.targets":
    raise ImportError("import deepinfer_compile.targets; 'targets' at the repository root is the same package by another name")
