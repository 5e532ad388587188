"""Kernel templates, one folder a kernel: Jinja sources that render to readable files."""

if __name__ != "deepinfer_compile.templates":
    raise ImportError(
        "import deepinfer_compile.templates; 'templates' at the repository root is the same package by another name"
    )
