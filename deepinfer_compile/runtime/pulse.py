"""Signs of life of the ranks of a process group, and which of them are gone.

When a collective fails, a process group does not say which rank is gone, and of one that only stands still it says
nothing until its own timeout. So each rank counts in the store of the group, in a thread with a connection of its own,
looks how far the others have counted, and leaves a note when it stops: steps do nothing for it. A rank that works for
long goes on counting and is not lost. While native code runs, which holds the interpreter's lock, it cannot; then the
ranks of its machine say for it that it works. The first that misses a rank notes which, so that all say the same.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PERIOD_S = 1.0
"""Between two signs of life of a rank."""
SILENT_S = 12.0
"""A rank that gives none for so long is lost."""
GONE_S = 8.0
"""The same after a collective has failed, which says that one is."""
STORE_S = 3.0
"""How long the store may take for an answer, and how long a rank waits for its note to be written."""
HEARD_S = 5.0
"""How long the rank that holds the store stays for others to read it."""

TOLD = "it was told to end"
_pulses: weakref.WeakKeyDictionary[dist.ProcessGroup, Pulse] = weakref.WeakKeyDictionary()


class Pulse:
    """What a rank knows of the others. store: of the group; host: the rank whose process holds it, None if none does;
    number: of these ranks alone.

    note: what this rank has to say: {} nothing, {"left": why} it takes part in nothing more, {"gone": {rank: why}} it
    stopped for these.
    """

    def __init__(self, store: Any, rank: int, size: int, host: int | None, group: Any, number: int = 0) -> None:
        self.rank, self.size, self.host = rank, size, host
        self._key = f"deepinfer/sign/{number}/{{}}".format
        self.note: dict[str, Any] = {}
        self.broken = ""
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=STORE_S))
        self._group = weakref.ref(group)
        self._others = [r for r in range(size) if r != rank]
        now = time.monotonic()
        self._began = self._looked = now
        self._seen = dict.fromkeys(self._others, now)
        self._signs: dict[int, bytes] = {}
        self._notes: dict[int, dict[str, Any]] = {r: {} for r in self._others}
        self._here = here()
        self._works: dict[int, Work] = {}
        self._count = 0
        self._hurry = self._ending = self._aborted = False
        self._wake, self._written = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def gone(self, patience: float | None = None) -> dict[int, str]:
        """The ranks that are lost, with what became of them: those that left, or are silent for so many seconds, by
        default SILENT_S."""
        patience = SILENT_S if patience is None else patience
        noted = {int(r): why for note in self._notes.values() for r, why in note.get("gone", {}).items()}
        if noted:
            return noted
        found = {r: f"has stopped ({note['left']})" for r, note in self._notes.items() if "left" in note}
        now = time.monotonic()
        if self.host not in (None, self.rank) and (self.broken or now - self._looked > patience):
            how = self.broken or f"it does not answer for {now - self._looked:.0f} s"
            return found or {self.host or 0: f"is gone (it holds the store of the ranks: {how})"}
        for r, seen in self._seen.items():
            if r not in found and self._looked - seen > patience:
                found[r] = f"is gone (no sign of life for {self._looked - seen:.0f} s)"
        return found

    def look(self, told: bool = False) -> dict[int, str]:
        """The ranks that are lost, when a collective has failed: waits until one is or all others gave a sign of life
        since then. told: this process was told to end, and others that were too are not lost."""
        begin = time.monotonic()
        self._hurry = True
        self._wake.set()
        while time.monotonic() - begin < GONE_S + STORE_S:
            ended = {r for r, note in self._notes.items() if told and TOLD in note.get("left", "")}
            found = {r: why for r, why in self.gone(GONE_S).items() if r not in ended}
            lives = {r for r in self._others if self._seen[r] > begin + 2 * PERIOD_S}
            if found or self.broken or len(lives | ended) == len(self._others):
                return found
            time.sleep(0.05)
        return {}

    def stopped_for(self, found: Mapping[int, str]) -> None:
        """Tell the others which ranks are lost; the rank that holds the store waits until they have read it."""
        self._say({"gone": dict(found)})
        begin = time.monotonic()
        while self.host == self.rank and time.monotonic() - begin < HEARD_S and not self.broken:
            if all(self._notes[r] for r in self._others if r not in found):
                return
            time.sleep(0.05)

    def leave(self, why: str) -> None:
        """Tell the others that this rank takes part in nothing more."""
        self._say({"left": why})

    def stop(self) -> None:
        """End the thread: one that comes back from the store while Python ends would abort the process."""
        atexit.unregister(self.stop)
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._ending = True
        self.leave(in_words(error) if error is not None else "its process has ended")
        self._wake.set()
        if not self._stuck():
            self._thread.join(STORE_S + (HEARD_S if self.host == self.rank else 1.0))

    def _say(self, note: dict[str, Any]) -> None:
        if not self.note:
            self.note = note
            self._wake.set()
            self._written.wait(0 if self._stuck() else STORE_S)

    def _stuck(self) -> bool:
        """Whether the store has not answered for so long that it will not."""
        return time.monotonic() - self._looked > 2 * STORE_S

    def _run(self) -> None:
        """What the thread does until it is told to end, or nobody has the group any more."""
        try:
            while not self._ending and self._group() is not None:
                self._beat()
                self._wake.wait(PERIOD_S / 5 if self._hurry else PERIOD_S)
                self._wake.clear()
            self._beat()
            begin = time.monotonic()
            while self.host == self.rank and time.monotonic() - begin < HEARD_S and self._awaited():
                time.sleep(PERIOD_S / 20)
                self._beat()
        except RuntimeError as error:  # the one type that all stores raise
            self.broken = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        finally:
            self._written.set()

    def _awaited(self) -> bool:
        """Whether a rank that lives may still read the store."""
        gone = self.gone(GONE_S)
        return any(not note and r not in gone for r, note in self._notes.items())

    def _beat(self) -> None:
        """Write a sign and read those of the others. Raises RuntimeError."""
        note, now = self.note, time.monotonic()
        self._count += 1
        sign = {"count": self._count, "note": note, "here": self._here, "working": self._working(now)}
        self._store.set(self._key(self.rank), json.dumps(sign))
        if note:
            self._written.set()
        # a key that is not there yet would be waited for
        there = [r for r in self._others if r in self._signs or self._store.check([self._key(r)])]
        for r, found in zip(there, self._store.multi_get([self._key(r) for r in there]) if there else (), strict=True):
            if found != self._signs.get(r):
                self._signs[r] = found
                self._heard(r, json.loads(found), now)
        self._looked = now
        group = self._group()
        if group is not None and not self._aborted and self.gone():
            self._aborted = True
            with contextlib.suppress(RuntimeError):
                group.abort()  # ends what waits on an accelerator; gloo has nothing to do for it

    def _heard(self, rank: int, sign: dict[str, Any], now: float) -> None:
        self._seen[rank], self._notes[rank] = now, sign["note"]
        machine, process = sign["here"]
        if machine == self._here[0]:
            self._works.setdefault(rank, Work(process))
        for other in sign["working"]:
            if other != self.rank:
                self._seen[other] = now

    def _working(self, now: float) -> list[int]:
        """The ranks of this machine that gave no sign and have used processors since the last look."""
        silent = [r for r in self._works if now - self._seen[r] > 2 * PERIOD_S]
        found = [r for r in silent if self._works[r].goes_on()]
        self._seen |= dict.fromkeys(found, now)
        return found


class Work:
    """Whether a process of this machine works, by the processor time that the kernel counts."""

    def __init__(self, process: int) -> None:
        self._file = Path(f"/proc/{process}/stat")
        self._began, self._used = self._read() or (-1, 0)

    def goes_on(self) -> bool:
        """Whether it has used some since the last look, and neither stands still nor has ended."""
        found = self._read()
        if found is None or found[0] != self._began:
            return False
        was, self._used = self._used, found[1]
        return self._used > was

    def _read(self) -> tuple[int, int] | None:
        """When it began and what it has used, in ticks, if it runs or waits."""
        try:
            # fields from the third on, see proc_pid_stat(5); the name before may hold spaces
            state, *rest = self._file.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if state in "TtZXx" else (int(rest[18]), int(rest[10]) + int(rest[11]))


def here() -> tuple[str, int]:
    """What names this machine and its processes alone, and the number of this process there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid"), os.getpid()


def in_words(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, SystemExit):
        return f"{TOLD} ({error})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def pulse_of(group: dist.ProcessGroup, number: int) -> Pulse:
    """The one of a group, started where it has none yet. number: the same on all ranks, which nobody had before, since
    a store may still hold the signs of ranks that were started before these."""
    if group not in _pulses:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        store: Any = group.get_group_store()
        _pulses[group] = Pulse(store, rank, size, _host(group, store), group, number)
    return _pulses[group]


def _host(group: dist.ProcessGroup, store: Any) -> int | None:
    """The rank whose process holds the store: of one on the network the first, unless torchrun's own process does."""
    stores: Any = dist
    while isinstance(store, stores.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, stores.TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return {dist.get_global_rank(group, r): r for r in range(dist.get_world_size(group))}.get(0)


__all__ = ["PERIOD_S", "TOLD", "Pulse", "in_words", "pulse_of"]
