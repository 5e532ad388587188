"""The passes, one file each, verb first; importing this package registers all of them."""

import importlib
import pkgutil

if __name__ != "deepinfer_compile.passes":
    raise ImportError(
        "import deepinfer_compile.passes; 'passes' at the repository root is the same package by another name"
    )

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
