"""Pages from disk to a device: memory that is used again is not used too early."""

from __future__ import annotations

import gc

import pytest
import torch

from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.disk_thread import DiskThread
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.kernel_blocks import StepState
from deepinfer_compile.runtime.page_rows import PageRows
from tests.runtime.test_page_rows import Program

pytestmark = pytest.mark.gpu
PAGES, ROUNDS = 96, 6


@pytest.fixture
def executor(monkeypatch) -> BundleExecutor:
    monkeypatch.setattr("deepinfer_compile.runtime.executor.PINNED", (PAGES + 1) * 4096)
    state = StepState.__new__(StepState)
    made = BundleExecutor({"decode": Program()}, [0, 7], 9, 64, 1.0, torch.device("cuda"), state, identity="m")
    made.allocate((ROUNDS * PAGES, ROUNDS * PAGES))
    return made


@pytest.mark.parametrize("late", [False, True])
def test_pages_come_whole_although_their_memory_is_used_again_at_once(late, executor, tmp_path):
    """late: the device has other work to do before it copies, while the next pages are read."""
    form, disk = executor.page_form(1), DiskPages(tmp_path, "m", 10**9)
    assert form.size <= 4096
    noise = torch.Generator().manual_seed(1)
    want = torch.randint(0, 256, (ROUNDS * PAGES, form.size), dtype=torch.uint8, generator=noise)
    names = [i.to_bytes(32, "little") for i in range(1, len(want) + 1)]
    for first in range(0, len(want), 16):
        disk.write_run(names[first : first + 16], 0, form, want[first : first + 16], names[first - 1] if first else b"")
    work, taken = DiskThread(disk, memory=executor.host_memory), set()
    for first in range(0, len(want), PAGES):
        reading = work.read([(name, 0) for name in names[first : first + PAGES]], 1e11)
        assert work.flush(60)
        rows = [reading.rows[name, 0] for name in names[first : first + PAGES]]
        taken.add(rows[0].content.data_ptr())
        assert rows[0].content.is_pinned()
        if late:
            torch.cuda._sleep(200_000_000)
        assert executor.write_pages(1, range(first, first + PAGES), rows) == PAGES
        work.drop(reading)
        del rows, reading
        gc.collect()
    assert len(taken) == 1
    got = executor.read_pages(1, range(len(want)))
    for page in range(len(want)):
        one, other = PageRows(form, got[page]), PageRows(form, want[page])
        assert all(
            torch.equal(one[n].reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8)) for n in one
        )
    assert executor.host_memory(10).is_pinned()
    assert not executor.host_memory(PAGES * 8192).is_pinned()
    assert work.close(60)
