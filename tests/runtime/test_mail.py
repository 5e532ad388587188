"""Messages over gloo between threads of this process, and what ranks must agree on before there are any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepinfer_compile.errors import RankLost
from deepinfer_compile.rank_errors import HandoverMismatch
from deepinfer_compile.runtime.handover import CacheRecord, HandoverRecord, first_difference, meet
from deepinfer_compile.runtime.mail import GroupMail
from deepinfer_compile.runtime.ranks import Ranks, Sent


class One(Ranks):
    """A rank of a group that this process has several of."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.patience, self.sent, self.lost = group, "they wait", Sent(), ""
        self.rank, self.size = rank, size


def together(work: Callable[[GroupMail], Any], ranks: int = 3, patience: float = 20.0) -> list[Any]:
    """What `work` gives on rank 0, of the one unit, and on the others, of the other; or what it raises."""
    store, found = dist.HashStore(), [None] * ranks

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=patience))
        mine = One(group, rank, ranks)
        mail = GroupMail(mine, [0] if rank else range(1, ranks), mine.sent, patience)
        try:
            found[rank] = work(mail)
        except RankLost as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_messages_come_in_order_with_their_rows() -> None:
    """Twice, as calls do; bytes of rows and of the rest are counted apart."""
    rows = torch.arange(1000, dtype=torch.int64).to(torch.uint8)

    def work(mail: GroupMail) -> Any:
        seen = []
        for _ in range(2):
            mail.begin()
            for i in range(5):
                for peer in mail.peers:
                    mail.send(peer, "number", {"i": i}, rows[: i * 100])
            mail.say_end()
            mail.send(mail.peers[0], "late", {})
            while mail.open:
                seen += mail.take(0.5)
            mail.close()
        for message in seen:
            if message.kind == "number":
                assert torch.equal(message.rows, rows[: message.body["i"] * 100])
        heads = 16 + len(b'{"kind": "number", "i": 0}')
        assert mail.sent.handed == 2 * 1000 * len(mail.peers)
        assert mail.sent.mail == 2 * len(mail.peers) * (5 * heads + 16 + len(b'{"kind": "end"}'))
        return [(m.peer, m.kind, m.body.get("i")) for m in seen]

    first, *others = together(work)
    each = [*(("number", i) for i in range(5)), ("end", None)]
    for peer in (1, 2):
        assert [(kind, i) for of, kind, i in first if of == peer] == each * 2
    for found in others:
        assert found == [(0, kind, i) for kind, i in each] * 2


def test_a_rank_that_does_not_go_on_says_why() -> None:
    def work(mail: GroupMail) -> Any:
        mail.begin()
        if mail.ranks.rank == 1:
            mail.close("it has had enough")
            with pytest.raises(RankLost, match="it has had enough"):
                mail.take()
            return None
        try:
            while True:
                mail.take(0.5)
        finally:
            mail.close()

    first, second, third = together(work)
    assert second is None
    assert "rank 1: it has had enough" in str(first)
    assert "rank 0: rank 1: it has had enough" in str(third)


def test_a_rank_that_only_waits_is_there_and_one_that_says_nothing_is_lost() -> None:
    """Patience of a second: a rank is silent for two while its threads say that it is there, then it has none."""

    def work(mail: GroupMail) -> Any:
        mail.begin()
        if mail.ranks.rank == 0:
            time.sleep(2)
            assert mail.take() == []
        else:
            time.sleep(2)
            mail._last("there", {})
        while True:
            mail.take(0.5)

    first, _ = together(work, ranks=2, patience=1.0)
    assert isinstance(first, RankLost)
    assert "rank 1: " in str(first)


def record(**changes: Any) -> HandoverRecord:
    caches = tuple(CacheRecord(f"cache_{i}", "kv", i, 0, 0, "float32", (2, 64, 2, 12)) for i in range(2))
    fields = {"version": 1, "units": {"prefill": 1, "decode": 2}, "page_size": 64, "caches": caches, "context": 200}
    return HandoverRecord(**{**fields, "vocab_size": 7, "weights": "ab", **changes})


class Told:
    """`Ranks` that say what they are told to."""

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)

    def told(self, data: bytes) -> list[bytes]:
        return self.said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version is 1 on rank 0 and 2 on rank 2"),
        ({"page_size": 32}, "page_size is 64 on rank 0 and 32 on rank 2"),
        ({"units": {"prefill": 2, "decode": 1}}, "units.prefill is 1 on rank 0 and 2 on rank 2"),
        ({"caches": record().caches[:1]}, r"caches\[1\] is \{'name': 'cache_1'.* on rank 0 and 'nothing' on rank 2"),
        ({"caches": (record().caches[0], CacheRecord("cache_1", "kv", 1, 0, 9, "float32", (2, 64, 2, 12)))},
         r"caches\[1\].window is 0 on rank 0 and 9 on rank 2"),
        ({"caches": (record().caches[0], CacheRecord("cache_1", "kv", 1, 0, 0, "float32", (2, 64, 2, 6)))},
         r"caches\[1\].shape is \[2, 64, 2, 12\] on rank 0 and \[2, 64, 2, 6\] on rank 2"),
        ({"weights": "cd"}, "weights is 'ab' on rank 0 and 'cd' on rank 2"),
    ],
)  # fmt: skip
def test_the_first_field_that_differs_is_named_with_both_values(changes: dict[str, Any], words: str) -> None:
    own = record().to_bytes()
    with pytest.raises(HandoverMismatch, match=words):
        meet(Told(own, own, record(**changes).to_bytes()), record())
    meet(Told(own, own, own), record())


def test_what_is_no_record_is_another_one() -> None:
    own = record().to_bytes()
    for said in (b"\xff\xfe nonsense", b"[]", b"null", b'{"version": 1}'):
        with pytest.raises(HandoverMismatch, match="rank 0 and"):
            meet(Told(own, said), record())
    assert first_difference({"a": 1, "b": 2}, {"a": 1, "b": 2}) is None
    assert first_difference({"a": 1}, {"a": True}) == ("a", 1, True)
    assert first_difference({"a": 1}, {"a": 1, "c": [0]}) == ("c", "nothing", [0])
