"""Rendered Triton sources to binaries: one worker process for as many kernels as a build has, and the build cache.

The worker (`triton_worker.py`) is started at the first kernel that the cache lacks. It gets an environment of its own:
no interpreter mode, a private Triton cache that goes away with it, no line information, and floating-point fusion set
explicitly, since its default differs between versions. A job that takes too long ends the worker, and with it the job.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

from deepinfer_compile import render
from deepinfer_compile.artifacts import cached, key_name
from deepinfer_compile.bundle import jsonio
from deepinfer_compile.errors import KernelTooLarge, NativeBuildFailed
from deepinfer_compile.kernels import AnySpec, fields_of, render_kernel
from deepinfer_compile.runtime.launch import LaunchPlan, plan_to_json

RECORD = "kernel.json"
SOURCE = "kernel.py"
DIALECT = "triton"
LIMIT_S = 300.0
_WORKER = Path(__file__).with_name("triton_worker.py")
_WARP = 32


@dataclass(frozen=True)
class Kernel:
    """One kernel to compile. entry functions are in `plan`; `text` is the rendered source."""

    spec: AnySpec
    params: Any
    config: Any
    text: str
    plan: LaunchPlan

    @classmethod
    def of(cls, spec: AnySpec, params: Any, config: Any) -> Kernel:
        """Render a spec. Raises what `render_kernel` raises."""
        text = render_kernel(spec, params, config, DIALECT)
        return cls(spec, params, config, text, spec.plan(params, config))


@dataclass
class TritonCompiler:
    """A context: compiles kernels for one GPU architecture. target: the name in messages and records."""

    target: str
    arch: int
    shared_bytes: int
    version: str
    cache: Path | None = None
    _worker: subprocess.Popen[str] | None = field(default=None, init=False, repr=False)
    _scratch: Path | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> TritonCompiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and remove its files."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._worker = self._scratch = None

    def key(self, kernel: Kernel) -> dict[str, Any]:
        """Everything the binaries depend on."""
        worker = sha256(_WORKER.read_bytes()).hexdigest()
        plan = plan_to_json(kernel.plan)
        made = {"kind": "triton-kernel", "target": self.target, "arch": self.arch, "triton": self.version}
        return {**made, "worker": worker, "source": kernel.text, "plan": plan, "shared_bytes": self.shared_bytes}

    def name(self, kernel: Kernel) -> str:
        """What a bundle calls the kernel: a hash of its key."""
        return key_name(self.key(kernel))[:16]

    def compile(self, kernel: Kernel) -> Path:
        """Folder of source, binaries and record, from the cache or built. Raises NativeBuildFailed, KernelTooLarge."""

        def build(folder: Path) -> None:
            (folder / SOURCE).write_text(kernel.text)
            binaries = self._run(kernel, folder)
            (folder / RECORD).write_bytes(jsonio.dumps(self._record(kernel, binaries)))

        return cached(self.key(kernel), build, self.cache)

    def _record(self, kernel: Kernel, binaries: list[dict[str, Any]]) -> dict[str, Any]:
        """What a launcher and a reader need to know, binaries in the order of the plan's launches."""
        template = kernel.spec.template(DIALECT)
        return {
            "kernel": kernel.spec.name,
            "op": kernel.spec.op.name,
            "target": self.target,
            "triton": self.version,
            "source": SOURCE,
            "stamp": kernel.text.split("\n", 1)[0].removeprefix("# "),
            "params": render.encode_values(template, fields_of(kernel.params)),
            "config": render.encode_values(template, fields_of(kernel.config)),
            "plan": plan_to_json(kernel.plan),
            "binaries": binaries,
        }

    def _run(self, kernel: Kernel, folder: Path) -> list[dict[str, Any]]:
        """Have the worker compile every launch into `folder`."""
        launches = [
            {
                "entry": launch.entry,
                "signature": [[a.name, a.type] for a in launch.arguments],
                "multiples": [a.multiple for a in launch.arguments],
                "options": launch.options,
            }
            for launch in kernel.plan.launches
        ]
        job = {"source": str(folder / SOURCE), "out": str(folder), "backend": "cuda", "arch": self.arch, "warp": _WARP}
        answer = self._ask({**job, "launches": launches})
        if "error" in answer:
            raise self._failed(kernel, answer["error"], answer.get("detail", ""))
        found: list[dict[str, Any]] = answer["launches"]
        for launch, binary in zip(kernel.plan.launches, found):
            if binary["shared_bytes"] > self.shared_bytes:
                raise KernelTooLarge(
                    what_=f"kernel {kernel.spec.name} with {kernel.config}",
                    target=self.target,
                    entry=launch.entry,
                    needed=binary["shared_bytes"],
                    limit=self.shared_bytes,
                )
        return found

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """One job to the worker, which is started if there is none."""
        worker = self._worker or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        timer = Timer(LIMIT_S, worker.kill)
        timer.start()
        try:
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        assert self._scratch is not None
        detail = (self._scratch / "log").read_text()
        code = worker.wait()
        self.close()
        return {"error": f"the compiler's process ended with code {code} (limit {LIMIT_S:g} s)", "detail": detail}

    def _start(self) -> subprocess.Popen[str]:
        self._scratch = Path(tempfile.mkdtemp(prefix="deepinfer-triton-"))
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("TRITON_", "MLIR_"))}
        own = {
            "TRITON_CACHE_DIR": str(self._scratch / "cache"),
            "TRITON_DISABLE_LINE_INFO": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",
        }
        with (self._scratch / "log").open("w") as log:
            self._worker = subprocess.Popen(
                [sys.executable, str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **own},
            )
        return self._worker

    def _failed(self, kernel: Kernel, reason: str, detail: str) -> NativeBuildFailed:
        """The error, with source and compiler output kept for the reader."""
        log = Path(tempfile.mkdtemp(prefix="deepinfer-log-"))
        (log / SOURCE).write_text(kernel.text)
        (log / "compiler.txt").write_text(f"{reason}\n{detail}\n")
        what = f"kernel {kernel.spec.name} with {kernel.config}"
        return NativeBuildFailed(what_=what, target=self.target, reason=reason, log=log)


def missing_tools() -> str | None:
    """Why Triton cannot compile here, or None. Triton is not imported."""
    found = find_spec("triton")
    if found is None or found.origin is None:
        return "triton is not installed (pip install triton)"
    tools = Path(found.origin).parent / "backends" / "nvidia" / "bin"
    lack = [name for name in ("ptxas", "cuobjdump") if not (tools / name).exists()]
    return f"this triton comes without {' and '.join(lack)}; install the Linux wheel" if lack else None
