"""The ranks of a bundle whose experts are spread: what carries rows between them, and how they stay in step.

Each rank serves its own requests, so what they have to do differs. Before every step all of them tell each other which
program they need and for how many tokens, and then run the same one: the widest that anybody needs. A rank that has
nothing to do takes part with one token that belongs to no request, and chooses no expert, until nobody has.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_compile.errors import RankLost, WrongTarget
from deepinfer_compile.runtime.pulse import PERIOD_S, Pulse, in_words, pulse_of

IDLE, WAIT = "idle", "wait"
KINDS = (IDLE, WAIT, "decode", "verify", "prefill")
"""What a rank may need, a later one doing what an earlier one does; who waits has nothing now and may have later."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What carries tensors between ranks, by where rows are."""
TIMEOUT_S = 120.0
"""How long ranks that `join` has brought together wait for each other, where all of them live."""
LOOK = timedelta(seconds=PERIOD_S)
"""How long a rank waits before it looks whether the others live."""
_KEPT: list[Any] = [None]
"""Collectives of which a thread of the group may still be holding the tensors: those that failed, and the last one that
ended. Letting go of the last hold of one takes the interpreter's lock, and a thread that waits for it when Python ends
aborts the process; so they stay."""


@dataclass
class Sent:
    """Bytes that a rank has given to others. rows: of experts' work; sizes: how many rows come; steps: what to run;
    start: what it has loaded; loads: what tokens chose; handed: cache rows of requests, to ranks that decode; mail:
    what is said about these.

    With N ranks, rows of H values of b bytes, n(r) rows of this rank's choices for rank r and m(r) rows that came from
    r, a step gives 16 * (N - 1) to steps. Each layer of it gives, over all r but this rank: in the exact form
    8 * (N - 1) to sizes and the sum of n(r) * (H * b + 4) + m(r) * H * b to rows; in the static form
    (N - 1) * L * (2 * H * b + 4) to rows, where L = min(k, room) * the most tokens of a rank. Placing
    gives 64 * (N - 1) to start, loading 8 * (N - 1) more; a sum of counts of B bytes 2 * B * (N - 1) / N to loads, as a
    ring does. A request of n written rows gives, for each cache group, its pages from the first that is still read to
    the last, ceil(n / 64), times what a page of all caches of the group takes, each in multiples of 64 bytes, to
    handed.
    """

    rows: int = 0
    sizes: int = 0
    steps: int = 0
    start: int = 0
    loads: int = 0
    handed: int = 0
    mail: int = 0


@dataclass
class Ranks:
    """The ranks of one process group (`Peers` of the operations), or a process alone. Every call waits for all of them.

    patience: how long the group waits, in words. pulse: which ranks live. lost: why the ranks are not together any
    more; gone: those for which. Raises RankLost.
    """

    group: dist.ProcessGroup | None = None
    patience: str = ""
    sent: Sent = field(default_factory=Sent)
    pulse: Pulse | None = None
    lost: str = ""
    gone: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.size = dist.get_world_size(self.group) if self.group is not None else 1

    def exchange(self, rows: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """See `Peers`."""
        if self.group is None:
            return rows
        out = rows.new_empty((sum(take), *rows.shape[1:]))
        self._together(dist.all_to_all_single, out, rows.contiguous(), list(take), list(give))
        row = rows.element_size()
        for size in rows.shape[1:]:
            row *= size
        amount = row * (sum(give) - give[self.rank])
        if rows.dim() == 1 and rows.dtype == torch.int64:
            self.sent.sizes += amount
        else:
            self.sent.rows += amount
        return out

    def agree(self, kind: str, tokens: int) -> tuple[str, int]:
        """The program that all ranks run now, `idle` when none has work, and the most tokens that one of them has."""
        if self.group is None and not self.lost:
            return kind, tokens
        found, sent = self._gather([KINDS.index(kind), tokens])
        self.sent.steps += sent
        most = found.amax(0).tolist()
        return KINDS[most[0]], int(most[1])

    def alike(self, data: bytes) -> bool:
        """Whether all ranks have the same data."""
        if self.group is None:
            return True
        digest = hashlib.sha256(data).digest()
        found, sent = self._gather([int.from_bytes(digest[i : i + 4], "big") for i in range(0, 32, 4)])
        self.sent.start += sent
        return bool((found == found[0]).all())

    def told(self, data: bytes) -> list[bytes]:
        """What every rank says, by rank."""
        if self.group is None:
            return [data]
        sizes, sent = self._gather([len(data)])
        mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._together(dist.all_gather, found, mine)
        self.sent.start += sent + mine.nbytes * (self.size - 1)
        return [bytes(one[:size].numpy()) for one, size in zip(found, sizes[:, 0].tolist())]

    def total(self, counts: Tensor) -> Tensor:
        """The sum of the ranks' counts, all of one form."""
        if self.group is None:
            return counts
        found = counts.clone()
        self._together(dist.all_reduce, found)
        self.sent.loads += 2 * found.nbytes * (self.size - 1) // self.size
        return found

    def number(self) -> int:
        """A number that all ranks have, and none had before."""
        found, sent = self._gather([secrets.randbits(62)])
        self.sent.start += sent
        return int(found[0, 0])

    def _gather(self, numbers: list[int]) -> tuple[Tensor, int]:
        """The numbers of all ranks, a row each, and the bytes given to others."""
        mine = torch.tensor(numbers)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        _KEPT[:1] = [self._together(dist.all_gather, found, mine)]
        return torch.stack(found), mine.nbytes * (self.size - 1)

    def leave(self, what: str, error: BaseException) -> None:
        """This rank takes part in nothing more, since something ended early; the others are told. Raises RankLost."""
        if self.lost:
            return
        if isinstance(error, SystemExit):
            self._told(None, error)
        else:
            self._give_up(None, in_words(error), {})
        self.lost = self.lost if self.gone else f"{what} of this rank ended early"
        if self.gone:
            raise self._error() from None

    def _together(self, collective: Any, *args: Any) -> Any:
        """Call a collective, which gives its work; what fails in it is another rank's end: there is no going on."""
        if self.lost:
            raise self._error()
        work: Any = None
        try:
            work = collective(*args, group=self.group, async_op=True)
            if self._waited(work, args[0]):
                return work
            self._give_up(work, "", self.pulse.gone() if self.pulse is not None else {})
        except RuntimeError as error:  # the one type that all backends raise, of peers gone and of timeouts
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._give_up(work, words, self._look())
        except SystemExit as error:
            self._told(work, error)
            if not self.gone:
                raise
        except BaseException as error:
            self._give_up(work, in_words(error), {})
            raise
        raise self._error()

    def _waited(self, work: Any, out: Any) -> bool:
        """Wait for a collective; False if a rank is lost before. Raises RuntimeError."""
        there = out if isinstance(out, Tensor) else out[0]
        if self.pulse is None or there.device.type != "cpu":  # the device waits, not the process
            work.wait()
            return True
        while True:
            try:
                work.wait(LOOK)
                return True
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it ended with
                    return True
            if self.pulse.gone():
                return False

    def _told(self, work: Any, error: SystemExit) -> None:
        """This process was told to end, which what has started the ranks does to all when one is gone."""
        self._give_up(work, in_words(error), self._look(told=True))

    def _look(self, told: bool = False) -> dict[int, str]:
        """See `Pulse.look`. Being told to end while it looks is no reason to stop."""
        if self.pulse is None:
            return {}
        try:
            return self.pulse.look(told)
        except SystemExit:
            return self.pulse.look(told=True)

    def _give_up(self, work: Any, words: str, found: Mapping[int, str]) -> None:
        """Remember why there is no going on, and tell the others."""
        if work is not None:
            _KEPT.append(work)
            if not work.is_completed():  # its thread may wait for long, and so would the end of the group
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.gone = tuple(sorted(found))
        self.lost = ", ".join(self._of(r, found[r]) for r in self.gone) or words
        if self.pulse is None:
            return
        if found:
            self.pulse.stopped_for(found)
        else:
            self.pulse.leave(words)

    def _error(self) -> RankLost:
        return RankLost(rank=self.rank, ranks=self.size, reason=self.lost, patience=self.patience, gone=self.gone)

    def _of(self, rank: int, why: str) -> str:
        if rank == self.rank:
            return f"the others have taken this rank for lost: it {why}"
        return f"rank {rank} of {self.size} {why}"


def join(group: dist.ProcessGroup | None, needed: int, timeout: float = TIMEOUT_S, device: str = "cpu") -> Ranks:
    """The ranks of a group; without one, of all processes that torchrun has started, brought together here if nobody
    has done it; then a SIGTERM ends this process as an exit does, so that it can say which rank is gone. device: where
    rows are; what ranks agree on is on the host. Raises WrongTarget where they are not as many as needed, or cannot
    carry rows of both, RankLost."""
    patience = f"where all live, they wait {timeout:g} s for each other"
    if group is None and not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        try:
            dist.init_process_group(BACKENDS[device], timeout=timedelta(seconds=timeout))
            atexit.register(_leave)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                with contextlib.suppress(ValueError):  # of a thread that is not the main one
                    # torchrun ends all ranks so when one is gone, and they have to say which
                    signal.signal(signal.SIGTERM, _terminated)
        except RuntimeError as error:
            rank, ranks = os.environ.get("RANK", "?"), os.environ["WORLD_SIZE"]
            raise RankLost(rank=rank, ranks=ranks, reason=str(error).splitlines()[0], patience=patience) from error
    elif group is not None or dist.is_initialized():
        patience = "where all live, the timeout of the process group says how long they wait for each other"
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    found = dist.get_world_size(group) if group is not None else 1
    if found != needed:
        fix = f"start {needed} processes with torchrun --nproc-per-node {needed}, or build for {found}"
        raise WrongTarget(built_for=f"experts over {needed} ranks", found=f"{found}", fix=fix)
    carried = {kind.type for kind in group._device_types} if group is not None else {"cpu", device}
    if missing := {"cpu", device} - carried:
        fix = f"use torch.distributed.init_process_group({BACKENDS[device]!r})"
        raise WrongTarget(built_for=f"ranks that exchange tensors on {device}", found=f"none on {missing}", fix=fix)
    return watched(Ranks(group, patience))


def watched(ranks: Ranks) -> Ranks:
    """Ranks that see from now on which of them live. All of them call it. Raises RankLost."""
    if ranks.group is not None and ranks.size > 1:
        ranks.pulse = pulse_of(ranks.group, ranks.number())
    return ranks


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _leave() -> None:
    """End the group before Python ends, whose own end does not wait for the group's threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


def neighbours(ranks: Ranks) -> int:
    """How many of the ranks share this machine's memory, by what torchrun says."""
    return max(1, min(ranks.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def take_device() -> None:
    """Let this process use the CUDA device of torchrun's number for it. Raises WrongTarget where there are fewer."""
    local, have = int(os.environ.get("LOCAL_RANK", "-1")), torch.cuda.device_count()
    if local >= have:
        fix = f"start at most {have} processes on this machine"
        raise WrongTarget(built_for="a CUDA device for each rank", found=f"{have} devices, rank {local}", fix=fix)
    if local >= 0:
        torch.cuda.set_device(local)


__all__ = ["IDLE", "KINDS", "WAIT", "Ranks", "Sent", "join", "neighbours", "take_device", "watched"]
