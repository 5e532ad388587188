"""Compiles rendered Triton sources to binaries, one job a line, in a process of its own that needs no GPU.

Run as a script, not imported: a compiler that aborts takes only this process with it, the environment of the caller
(interpreter mode, caches, dumps) does not reach it, and it starts without torch. A job is a JSON object

    {"source": path, "out": folder, "backend": "cuda", "arch": 90, "warp": 32, "launches": [
        {"entry": name, "signature": [[name, type], ...], "multiples": [number, ...], "options": {...}}, ...]}

and its answer {"launches": [...]} or {"error": reason}: for every launch the file written to the folder and what a
launcher must know. Line information is off, so the bytes do not depend on where the source lies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PARAMETER = re.compile(r"\.param\s")


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What a job gives."""
    try:
        module = _load(Path(job["source"]))
        return {"launches": [_compile(module, launch, job) for launch in job["launches"]]}
    except Exception as err:  # the compiler raises many unrelated types; the caller reports each as a failed build
        lines = [line for line in str(err).strip().splitlines() if line.strip()]
        return {"error": f"{type(err).__name__}: {lines[-1].strip() if lines else 'no message'}", "detail": str(err)}


def _load(path: Path) -> Any:
    """The rendered source as a module; the compiler reads its text again, from the file."""
    spec = importlib.util.spec_from_file_location(f"rendered_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compile(module: Any, launch: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, launch["entry"])
    signature = dict(launch["signature"])
    if list(signature) != list(function.arg_names):
        raise ValueError(f"{launch['entry']} takes {list(function.arg_names)}, its plan gives {list(signature)}")
    attrs = {(i,): [["tt.divisibility", m]] for i, m in enumerate(launch["multiples"]) if m > 1}
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)
    target = GPUTarget(job["backend"], job["arch"], job["warp"])
    made = triton.compile(source, target=target, options={**launch["options"], "enable_fp_fusion": True})
    file = Path(job["out"], f"{launch['entry']}.cubin")
    file.write_bytes(made.asm["cubin"])
    meta = made.metadata
    ptx = made.asm["ptx"]
    return {
        "file": file.name,
        "symbol": meta.name,
        "shared_bytes": meta.shared,
        "num_warps": meta.num_warps,
        "threads": meta.num_warps * job["warp"],
        "cluster": getattr(meta, "num_ctas", 1),
        "hidden_pointers": _parameters(ptx, meta.name) - len(signature),
        "global_scratch_bytes": getattr(meta, "global_scratch_size", 0) or 0,
        "arch": re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1],  # type: ignore[index]
        **_resources(file),
    }


def _parameters(ptx: str, symbol: str) -> int:
    """How many parameters the entry has, the compiler's own (scratch pointers, all null here) included."""
    head = ptx[ptx.index(f".entry {symbol}(") :]
    return len(PARAMETER.findall(head[: head.index(")")]))


def _resources(file: Path) -> dict[str, int]:
    """Registers a thread, and bytes of stack a thread, where spilled registers go."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", done.stdout))
    return {"registers": int(usage["REG"]), "stack_bytes": int(usage["STACK"])}


def main() -> None:
    """Answer jobs from stdin until it ends. What libraries print must not mix with the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
