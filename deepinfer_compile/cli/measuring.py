"""`explain --measure`: what the kernels of a bundle take on this machine, launched as the bundle launches them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepinfer_compile.bundle import BundleFiles
from deepinfer_compile.cli.facts import kernel_case
from deepinfer_compile.errors import CannotMeasure
from deepinfer_compile.kernels import AnySpec, Case
from deepinfer_compile.runtime.kernel_blocks import KernelRunner
from deepinfer_compile.runtime.launch import tensors_of
from deepinfer_compile.sweep_machine import GraphTimer

Open = Callable[[BundleFiles, str, torch.device], KernelRunner]


def measure(files: BundleFiles, rows: list[dict[str, Any]], open_kernel: Open | None = None, timer: Any = None) -> None:
    """Add `measured` to every choice of the rows (`describe_kernels`) whose target this machine is: {"us": median
    microseconds or None, "reason": why it is None}. Equal kernels at equal sizes are measured once.

    open_kernel, timer: what to launch and to time with, cubins in CUDA graphs if not given. Raises CannotMeasure where
    no variant is for this machine.
    """
    device = torch.device("cuda", 0) if open_kernel is None else torch.device("cpu")
    targets = {name for name in files.manifest.variants if open_kernel is not None or _fits(files, name)}
    if not targets & {row["target"] for row in rows}:
        names = ", ".join(files.manifest.variants)
        fix = "run it on a machine with a GPU that the bundle was built for, or build the bundle for this one"
        raise CannotMeasure(reason=f"the bundle is for {names}, and this machine has no such GPU", fix=fix)
    known: dict[tuple[str, str, int, bool], dict[str, Any]] = {}
    for row in (r for r in rows if r["target"] in targets and "choices" in r):
        paths = files.manifest.variants[row["target"]]["kernels"]
        for choice in (c for c in row["choices"] if "library" not in c):
            key = (row["target"], choice["hash"], choice["at"], row["program"] == "prefill")
            if key not in known:
                path = paths[choice["hash"]]
                found = kernel_case(files.json(path), choice["at"], row["program"])
                run = partial(open_kernel or _cubin, files, path, device)
                known[key] = _timed(found, run, timer or GraphTimer(), device)
            choice["measured"] = known[key]


def _fits(files: BundleFiles, target: str) -> bool:
    wanted = files.manifest.variants[target]["requires"].get("capability")
    return torch.cuda.is_available() and list(torch.cuda.get_device_capability()) == wanted


def _cubin(files: BundleFiles, path: str, device: torch.device) -> KernelRunner:
    from deepinfer_compile.runtime.cubins import Cubin

    return Cubin(files, path, device)


def _timed(
    found: tuple[AnySpec, Case[Any]] | None, open_kernel: Callable[[], KernelRunner], timer: Any, device: torch.device
) -> dict[str, Any]:
    if found is None:
        return {"us": None, "reason": "its template is another one today"}
    spec, case = found
    try:
        given = operands(spec, case, device)
        made = spec.op.fake(*given.values())
        results = made if isinstance(made, tuple) else (made,)
        tensors, kernel = tensors_of(given), open_kernel()
        return {"us": float(timer(lambda: kernel(tensors, results)).us), "reason": ""}
    except torch.OutOfMemoryError:
        return {"us": None, "reason": "its operands do not fit into memory"}


def operands(spec: AnySpec, case: Case[Any], device: torch.device) -> dict[str, Any]:
    """A case's operands, made on the device."""
    with device:
        given = spec.inputs(case, torch.Generator(device).manual_seed(0))
    moved: dict[str, Any] = tree_map_only(Tensor, lambda held: held.to(device), given)
    return moved
