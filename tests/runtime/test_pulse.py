"""Ranks that stop giving signs of life, and what the others make of it. Ranks are threads on one store here."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from deepinfer_compile.runtime import pulse
from deepinfer_compile.runtime.pulse import TOLD, Pulse


class Group:
    """What stands for a process group."""

    aborted = 0

    def abort(self) -> None:
        self.aborted += 1


class Together:
    """Pulses of so many ranks. host: the one that holds the store."""

    def __init__(self, size: int, host: int | None = None) -> None:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.groups = [Group() for _ in range(size)]
        self.pulses = [Pulse(store, r, size, host, self.groups[r]) for r in range(size)]

    def kill(self, rank: int) -> None:
        """Its thread writes and reads no more, without a note."""
        self.pulses[rank]._beat = lambda: time.sleep(0.01)  # type: ignore[method-assign]

    def lose(self, rank: int) -> None:
        """Its store fails, as on a connection that breaks."""

        def fail(*given: Any) -> None:
            raise RuntimeError("Broken pipe\nException raised from somewhere")

        store = self.pulses[rank]._store
        self.pulses[rank]._store = type("Store", (), {"set": fail, "check": store.check})()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of different machines, so that none sees that the process of another works: it is this one."""
    machines = itertools.count()
    monkeypatch.setattr(pulse, "here", lambda: (f"machine {next(machines)}", 1))
    for name, seconds in {"PERIOD_S": 0.02, "SILENT_S": 1.5, "GONE_S": 1.0, "STORE_S": 1.0, "HEARD_S": 0.3}.items():
        monkeypatch.setattr(pulse, name, seconds)


@pytest.fixture
def ranks() -> Iterator[Together]:
    found = Together(3)
    yield found
    for one in found.pulses:
        one.stop()


def until(seconds: float, true: Any) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


def test_ranks_that_live_are_not_lost(ranks: Together) -> None:
    """However long none of them calls anything."""
    time.sleep(1.6)
    assert [one.gone() for one in ranks.pulses] == [{}] * 3
    begin = time.monotonic()
    assert ranks.pulses[0].look() == {}
    assert time.monotonic() - begin < 1.0
    assert not any(group.aborted for group in ranks.groups)


def test_a_rank_without_signs_of_life_is_lost(ranks: Together) -> None:
    """After a while, after less where a collective has failed; what waits on a device is ended, once."""
    ranks.kill(1)
    found = ranks.pulses[0].look()
    assert list(found) == [1]
    assert found[1].startswith("is gone (no sign of life for ")
    assert not ranks.pulses[2].gone()
    assert until(5, lambda: list(ranks.pulses[2].gone()) == [1])
    assert until(5, lambda: ranks.groups[2].aborted)
    time.sleep(0.1)
    assert ranks.groups[2].aborted == 1


def test_all_say_what_the_first_found(ranks: Together) -> None:
    """One that stops because of a lost rank is not lost, and the lost one learns it if it lives."""
    ranks.pulses[0].stopped_for({1: "is gone"})
    assert until(5, lambda: [p.gone() for p in ranks.pulses[1:]] == [{1: "is gone"}] * 2)
    ranks.kill(0)
    time.sleep(1.6)
    assert ranks.pulses[2].gone() == {1: "is gone"}


def test_a_rank_that_leaves_says_why(ranks: Together) -> None:
    ranks.pulses[2].leave("ValueError: bad")
    assert until(5, lambda: ranks.pulses[0].gone() == {2: "has stopped (ValueError: bad)"})
    ranks.pulses[1].stop()
    assert until(5, lambda: len(ranks.pulses[0].gone()) == 2)
    assert ranks.pulses[0].gone()[1] == "has stopped (its process has ended)"
    assert pulse.in_words(ValueError("one\ntwo")) == "ValueError: one"
    assert pulse.in_words(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_ranks_that_are_told_to_end_lose_nobody(ranks: Together) -> None:
    """Unless one of them has ended otherwise."""
    ranks.pulses[1].leave(pulse.in_words(SystemExit(143)))
    ranks.pulses[2].leave(pulse.in_words(SystemExit(143)))
    assert until(5, lambda: len(ranks.pulses[0].gone()) == 2)
    assert TOLD in ranks.pulses[0].gone()[1]
    assert ranks.pulses[0].look(told=True) == {}


def test_a_rank_is_lost_of_those_that_are_told_to_end(ranks: Together) -> None:
    ranks.pulses[1].leave(pulse.in_words(SystemExit(143)))
    ranks.kill(2)
    assert list(ranks.pulses[0].look(told=True)) == [2]


def test_the_rank_that_holds_the_store_goes_with_it() -> None:
    """It waits until the others have read what it found."""
    ranks = Together(3, host=0)
    assert until(5, lambda: all(len(p._signs) == 2 for p in ranks.pulses))
    ranks.kill(1)
    begin = time.monotonic()
    ranks.pulses[0].stopped_for({1: "is gone"})
    assert 0.3 <= time.monotonic() - begin < 1.0  # nobody has said that it read it
    ranks.lose(2)
    assert until(5, lambda: ranks.pulses[2].broken == "Broken pipe")
    assert ranks.pulses[2].look() == {1: "is gone"}
    ranks = Together(2, host=0)
    assert until(5, lambda: all(len(p._signs) == 1 for p in ranks.pulses))
    ranks.lose(1)
    assert until(5, lambda: ranks.pulses[1].broken)
    assert ranks.pulses[1].gone() == {0: "is gone (it holds the store of the ranks: Broken pipe)"}
    ranks.lose(0)
    assert until(5, lambda: ranks.pulses[0].broken)
    assert 0 not in ranks.pulses[0].gone(9)


def test_a_group_that_nobody_has_needs_no_signs() -> None:
    ranks = Together(2)
    ranks.groups.clear()
    assert until(5, lambda: not any(one._thread.is_alive() for one in ranks.pulses))


def test_a_process_that_works_is_told_from_one_that_stands_still() -> None:
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        work = pulse.Work(busy.pid)
        assert until(5, work.goes_on)
        os.kill(busy.pid, signal.SIGSTOP)
        assert until(5, lambda: not work.goes_on())
        time.sleep(0.05)
        assert not work.goes_on()
        os.kill(busy.pid, signal.SIGCONT)
        assert until(5, work.goes_on)
    finally:
        busy.kill()
    assert until(5, lambda: not work.goes_on())  # it is there until somebody waits for it
    busy.wait()
    assert not work.goes_on()
    assert not pulse.Work(busy.pid).goes_on()


def test_a_rank_that_cannot_count_is_spoken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of its own machine, also to those of others, as long as it works."""
    places = iter([("a", 1), ("a", 2), ("b", 3)])
    monkeypatch.setattr(pulse, "here", lambda: next(places))
    working = {"2": True}
    monkeypatch.setattr(pulse.Work, "goes_on", lambda self: working[self._file.parent.name])
    ranks = Together(3)
    assert until(5, lambda: all(len(p._signs) == 2 for p in ranks.pulses))
    ranks.kill(1)
    time.sleep(2.0)
    assert [ranks.pulses[r].gone() for r in (0, 2)] == [{}, {}]
    working["2"] = False
    assert until(5, lambda: [list(ranks.pulses[r].gone()) for r in (0, 2)] == [[1], [1]])
