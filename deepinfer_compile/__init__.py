"""Compile a PyTorch language model into a bundle of serving programs: `build` once, `load` anywhere, `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer_compile.errors import CompileError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deepinfer_compile.builder import build as build
    from deepinfer_compile.onnx_export import export_onnx as export_onnx
    from deepinfer_compile.runtime.llm import LLM as LLM
    from deepinfer_compile.runtime.loading import load as load
    from deepinfer_compile.runtime.outputs import CompletionOutput as CompletionOutput
    from deepinfer_compile.runtime.outputs import RequestOutput as RequestOutput
    from deepinfer_compile.runtime.params import SamplingParams as SamplingParams
    from deepinfer_compile.runtime.queued import QueueStats as QueueStats
    from deepinfer_compile.runtime.queued import run_queue as run_queue
    from deepinfer_compile.runtime.rebalance import ExpertStats as ExpertStats
    from deepinfer_compile.runtime.rebalance import Rebalance as Rebalance
    from deepinfer_compile.settings import BuildSettings as BuildSettings
    from deepinfer_compile.settings import ExpertPlan as ExpertPlan

# resolved on first use, so that running a bundle imports no compiler and compiling imports no engine
_PUBLIC = {
    "build": "builder",
    "export_onnx": "onnx_export",
    "load": "runtime.loading",
    "LLM": "runtime.llm",
    "SamplingParams": "runtime.params",
    "run_queue": "runtime.queued",
    "QueueStats": "runtime.queued",
    "Rebalance": "runtime.rebalance",
    "ExpertStats": "runtime.rebalance",
    "RequestOutput": "runtime.outputs",
    "CompletionOutput": "runtime.outputs",
    "BuildSettings": "settings",
    "ExpertPlan": "settings",
}

__all__ = [
    "LLM",
    "BuildSettings",
    "CompileError",
    "CompletionOutput",
    "ExpertPlan",
    "ExpertStats",
    "QueueStats",
    "Rebalance",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "build",
    "export_onnx",
    "load",
    "run_queue",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
