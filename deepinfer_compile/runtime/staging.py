"""Memory on the host from which a device copies by itself."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from deepinfer_compile.runtime.page_rows import host_memory

PINNED = 256 << 20
"""Bytes of it. What does not fit, as when many long requests wait for a disk, lies in other memory, from which a copy
takes longer."""
_ALIGN = 4096


class Staging:
    """A piece of memory that a device reaches, given out in parts, one behind the other; from its beginning again when
    none is in use.

    It is made once: to make it takes milliseconds for some megabytes, and what torch keeps of it for later is given
    back whenever a graph is captured. A part is in use while there is a tensor of it, in any thread. What it held may
    be let go when `copied` says that its copies have been started; the next one waits for them. block: the memory, u8.
    """

    def __init__(self, block: Tensor) -> None:
        self._block = block.numpy()
        self._lock, self._end = threading.Lock(), 0
        self._parts: set[object] = set()
        self._started: torch.cuda.Event | None = None

    def take(self, size: int) -> Tensor:
        """So many bytes, u8."""
        with self._lock:
            self._end = self._end if self._parts else 0
            start, token = self._end, object()
            if start + size > len(self._block):
                return host_memory(size)
            self._end = start + -(-size // _ALIGN) * _ALIGN
            self._parts.add(token)
            started = self._started
        part = self._block[start : start + size]
        # the collector may do it amid anything, so without the lock
        weakref.finalize(part, self._parts.discard, token).atexit = False
        if started is not None:
            started.synchronize()
        return torch.from_numpy(part)  # which lives as long as any view of the tensor's memory

    def copied(self, stream: torch.cuda.Stream) -> None:
        """Copies from parts have been started on a stream."""
        event = torch.cuda.Event()
        event.record(stream)
        self._started = event
