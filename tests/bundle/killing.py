"""Processes that die: before a chosen file system call, or at a chosen time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from deepinfer_compile.bundle import replace

CALLS = ("fsync", "rename", "mkdir", "open", "write", "unlink", "rmdir", "close")


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked child; return its pid. The child never comes back."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def die_at(call: int, two_renames: bool = False) -> None:
    """In a child: count file system calls and be killed just before number `call`."""
    count = 0

    def counted(real: Callable) -> Callable:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    exchange = counted(replace.exchange)
    replace.exchange = (lambda first, second: False) if two_renames else exchange


def killed_at(call: int, work: Callable[[], object], two_renames: bool = False) -> bool:
    """Run `work` in a child that dies before its file system call number `call`; whether it came that far."""

    def run() -> None:
        die_at(call, two_renames)
        work()

    _, status = os.waitpid(in_child(run), 0)
    return os.WIFSIGNALED(status)


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed after some time; whether it was still at it."""
    child = in_child(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def count_calls(prepare: Callable[[], object], work: Callable[[], object], two_renames: bool = False) -> int:
    """How many counted calls `work` makes after `prepare`: found by halving."""
    low, high = 1, 1 << 14
    while low < high:
        middle = (low + high) // 2
        prepare()
        low, high = (middle + 1, high) if killed_at(middle, work, two_renames) else (low, middle)
    prepare()
    return low - 1
