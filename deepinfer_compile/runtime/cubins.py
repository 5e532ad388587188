"""Kernels of a bundle on an NVIDIA GPU: binaries loaded and launched through cuda.core, on torch's current stream.

Nothing is compiled and Triton is not imported. A launch takes what its plan says and, behind that, the scratch
pointers of the compiler's own, which no kernel of ours uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_compile.bundle import BundleFiles
from deepinfer_compile.errors import BundleCorrupt, MissingExtra
from deepinfer_compile.runtime.kernel_blocks import kernel_record
from deepinfer_compile.runtime.launch import (
    EARLY,
    Launch,
    buffer_shape,
    check_operands,
    evaluate,
    plan_from_json,
    values_of,
)

PLENTY = 48 * 1024
"""Bytes of shared memory that a kernel gets without asking."""
_NUMBERS = {"i32": np.int32, "i64": np.int64}
_C_TYPES = {int: ctypes.c_void_p, np.int32: ctypes.c_int32, np.int64: ctypes.c_int64}


class Cubin:
    """One kernel record, ready to launch on a device."""

    def __init__(self, files: BundleFiles, path: str, device: torch.device) -> None:
        core = cuda_core()
        record = kernel_record(files, path)
        folder = path.rpartition("/")[0]
        self.name, self.device = str(record["kernel"]), device
        self.plan = plan_from_json(record["plan"], path)
        self.launch, self.config, self.stream = core.launch, core.LaunchConfig, core.Stream
        if len(record["binaries"]) != len(self.plan.launches):
            raise BundleCorrupt(file=path, reason="its plan has other launches than it has binaries")
        self.entries = [self._entry(core, files.bytes(f"{folder}/{b['file']}"), b) for b in record["binaries"]]

    def _entry(self, core: Any, code: bytes, binary: Mapping[str, Any]) -> tuple[Any, int, int, int]:
        """(kernel, threads, bytes of shared memory, hidden pointers) of one binary."""
        from cuda.bindings import driver

        kernel = core.ObjectCode.from_cubin(code, name=binary["symbol"]).get_kernel(binary["symbol"])
        shared = int(binary["shared_bytes"])
        if shared > PLENTY:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(limit, shared, kernel.handle, self.device.index)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BundleCorrupt(
                    file=binary["file"], reason=f"it asks for {shared} bytes of shared memory: {status}"
                )
        return kernel, int(binary["threads"]), shared, int(binary["hidden_pointers"])

    def __call__(self, operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        """Run on operands by name; contiguous results are written, and operands that the operation writes."""
        check_operands(self.name, self.plan, operands)
        tensors = dict(operands)
        tensors |= {buffer.name: held for buffer, held in zip(self.plan.results, results, strict=True)}
        for buffer in self.plan.scratch:
            shape = buffer_shape(buffer, tensors)
            tensors[buffer.name] = torch.empty(shape, dtype=getattr(torch, buffer.dtype), device=self.device)
        stream = self.stream.from_handle(torch.cuda.current_stream(self.device).cuda_stream)
        for launch, entry in zip(self.plan.launches, self.entries):
            grid = tuple(evaluate(e, tensors) for e in launch.grid)
            if 0 not in grid:
                self._run(stream, launch, entry, grid, tensors)

    def _run(
        self,
        stream: Any,
        launch: Launch,
        entry: tuple[Any, int, int, int],
        grid: tuple[int, ...],
        tensors: Mapping[str, Tensor],
    ) -> None:
        kernel, threads, shared, hidden = entry
        values = values_of(self.name, launch, tensors)
        given = [
            v.data_ptr() if isinstance(v, Tensor) else _NUMBERS[a.type](v) for a, v in zip(launch.arguments, values)
        ]
        if launch.options.get(EARLY):
            _launch_early(stream, kernel, (*grid, 1, 1)[:3], threads, shared, [*given, *[0] * hidden])
            return
        config = self.config(grid=(*grid, 1, 1)[:3], block=threads, shmem_size=shared)
        self.launch(stream, config, kernel, *given, *[0] * hidden)


def _launch_early(
    stream: Any, kernel: Any, grid: tuple[int, ...], threads: int, shared: int, given: Sequence[Any]
) -> None:
    """A launch that may start before the launch before has ended (programmatic stream serialisation), which cuda.core
    has no name for."""
    from cuda.bindings import driver

    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, driver.CUstream(int(stream.handle))
    config.attrs, config.numAttrs = [early], 1
    types = tuple(_C_TYPES[type(value)] for value in given)
    function = driver.CUfunction(int(kernel.handle))  # a CUkernel stands for the function of the current context
    (status,) = driver.cuLaunchKernelEx(config, function, (tuple(int(v) for v in given), types), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a kernel could not be launched: {status}")


def cuda_core() -> Any:
    """The module cuda.core. Raises MissingExtra."""
    try:
        import cuda.core as core
    except ImportError:
        raise MissingExtra(package="cuda-core", purpose="kernels of a bundle on a GPU", extra="nvidia") from None
    return core
