"""Which native variant of a bundle this machine runs, and what it lacks for the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_compile.bundle import BundleFiles
from deepinfer_compile.errors import WrongTarget
from deepinfer_compile.runtime.native import processor_flags

ISA_FLAGS = {
    "x86-64-v3": ("avx2", "fma", "bmi2", "f16c"),
    "x86-64-v4": ("avx2", "fma", "bmi2", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}


def variant_of(files: BundleFiles, target: str | None, native: bool) -> dict[str, Any] | None:
    """The variant to run, or None for graph-only: the first that this machine can run, if no target is named.

    Raises WrongTarget: of the named target, or of the first variant where none fits.
    """
    variants: dict[str, dict[str, Any]] = files.manifest.variants
    if target is not None and target not in variants:
        raise WrongTarget(
            built_for=", ".join(variants), found=f"a request for {target!r}", fix=f"use one of {list(variants)}"
        )
    refusals: list[WrongTarget] = []
    for name in variants if target is None else (target,):
        if not native or not variants[name]["native"]:
            return None
        refusal = _refusal(name, variants)
        if refusal is None:
            return variants[name]
        refusals.append(refusal)
    raise refusals[0]


def variant_text(files: BundleFiles, target: str | None, native: bool) -> str:
    """The variant that runs, as text."""
    return json.dumps(variant_of(files, target, native), sort_keys=True)


def _refusal(name: str, variants: Mapping[str, Mapping[str, Any]]) -> WrongTarget | None:
    """Why this machine cannot run a native variant, or None."""
    requires = variants[name]["requires"]
    if requires.get("device", "cpu") != "cpu":
        return None if _has_device(requires) else _refuse_device(name, variants)
    found = {
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "abi": torch.compiled_with_cxx11_abi(),
    }
    for key, have in found.items():
        if requires.get(key) != have:
            fix = "install that version, rebuild, or load(native=False)"
            return WrongTarget(built_for=f"{key} {requires.get(key)}", found=f"{key} {have}", fix=fix)
    missing = missing_flags(requires)
    if not missing:
        return None
    fix = "rebuild, or load(native=False)"
    return WrongTarget(built_for=requires["isa"], found=f"a processor without {missing}", fix=fix)


def _has_device(requires: Mapping[str, Any]) -> bool:
    """Whether torch can use the device that a variant was built for. Raises MissingExtra where only a package lacks."""
    if requires["device"] != "cuda" or not torch.cuda.is_available():
        return False
    if list(torch.cuda.get_device_capability()) != list(requires.get("capability", ())):
        return False
    from deepinfer_compile.runtime.cubins import cuda_core

    cuda_core()
    return True


def _refuse_device(name: str, variants: Mapping[str, Mapping[str, Any]]) -> WrongTarget:
    """That this machine cannot run a variant for an accelerator: it is not there, or is another one."""
    requires = variants[name]["requires"]
    device, wanted = requires["device"], ".".join(map(str, requires.get("capability", ())))
    found = f"no {device} device that torch can use"
    if device == "cuda" and torch.cuda.is_available():
        have = ".".join(map(str, torch.cuda.get_device_capability()))
        found = f"a {device} device of capability {have}"
    others = [other for other, v in variants.items() if v["requires"].get("device", "cpu") == "cpu" and v["native"]]
    fix = f"load(target={others[0]!r})" if others else "load(native=False)"
    return WrongTarget(built_for=f"{name}, a {device} device of capability {wanted}", found=found, fix=fix)


def device_kind(variant: Mapping[str, Any] | None) -> str:
    """The kind of device that a variant runs on."""
    return str(variant["requires"].get("device", "cpu")) if variant is not None else "cpu"


def device_of(variant: Mapping[str, Any] | None) -> torch.device:
    """Where a variant runs."""
    kind = device_kind(variant)
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())


def missing_flags(requires: Mapping[str, Any]) -> str:
    """Processor features that native code needs and this machine lacks, in words.

    requires: the instruction set level `isa`, and `flags` where the compiler used whatever its own machine had.
    """
    isa = str(requires.get("isa", ""))
    if isa not in ISA_FLAGS:
        return f"support for {isa!r}"
    have = set(processor_flags())
    return " ".join(f for f in (*ISA_FLAGS[isa], *requires.get("flags", ())) if f not in have)


__all__ = ["ISA_FLAGS", "device_kind", "device_of", "missing_flags", "variant_of", "variant_text"]
