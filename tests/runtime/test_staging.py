"""Memory that a device reaches: whose part is whose, and when it is given out again."""

from __future__ import annotations

import gc
import threading

import torch

from deepinfer_compile.runtime.staging import Staging


class Event:
    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def lies_in(part: torch.Tensor, block: torch.Tensor) -> int:
    """Where a part begins; -1 for one elsewhere."""
    at = part.data_ptr() - block.data_ptr()
    return at if 0 <= at < len(block) else -1


def test_parts_lie_one_behind_the_other_and_none_is_given_out_twice():
    block = torch.zeros(20000, dtype=torch.uint8)
    staging = Staging(block)
    parts = [staging.take(size) for size in (5000, 1, 4096, 0, 3000)]
    assert [lies_in(part, block) for part in parts[:3]] == [0, 8192, 12288]
    assert lies_in(parts[4], block) == 16384
    assert [len(part) for part in parts] == [5000, 1, 4096, 0, 3000]
    late = staging.take(1000)
    assert lies_in(late, block) == -1
    assert len(late) == 1000
    late.fill_(7)
    assert not block.any()


def test_a_part_is_in_use_while_there_is_a_view_of_it():
    block = torch.zeros(10000, dtype=torch.uint8)
    staging = Staging(block)
    part = staging.take(9000)
    row = part[:8000].view(-1, 1000)[3]
    del part
    gc.collect()
    assert lies_in(staging.take(5000), block) == -1
    held = row.numpy()
    del row
    assert lies_in(staging.take(5000), block) == -1
    del held
    assert lies_in(staging.take(5000), block) == 0


def test_the_next_part_waits_for_copies_that_were_started():
    staging, event = Staging(torch.zeros(10000, dtype=torch.uint8)), Event()
    staging.take(10)
    assert event.waited == 0
    staging._started = event
    staging.take(10)
    staging.take(10**6)  # elsewhere
    assert event.waited == 1


def test_many_threads_take_and_let_go():
    block = torch.zeros(1 << 20, dtype=torch.uint8)
    staging, wrong = Staging(block), []

    def work(number: int) -> None:
        for i in range(300):
            part = staging.take(1 + 977 * (i % 40))
            part.fill_(number)
            if not (part == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert not staging._parts
