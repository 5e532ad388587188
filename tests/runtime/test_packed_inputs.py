"""The inputs of a replayed step: one copy brings them all, and seats without a request are idle whatever was there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from deepinfer_compile.runtime.cuda_graphs import SPARED, PackedInputs

CPU = torch.device("cpu")


def step(requests: int, pages: int, seed: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(1, 1 << 30, shape, generator=gen, dtype=dtype)

    return {
        "input_ids": draw(1, requests),
        "position_ids": draw(1, requests),
        "context_hint": draw(1, requests),
        "rows": torch.arange(requests),
        "query_start": torch.arange(requests + 1, dtype=torch.int32),
        "seq_len": draw(requests, dtype=torch.int32),
        "block_table_0": draw(requests, pages, dtype=torch.int32),
        "slot_0": draw(requests),
        "block_table_12": draw(requests, pages, dtype=torch.int32),
        "slot_12": draw(requests),
    }


def test_steps_of_changing_size_leave_nothing_behind() -> None:
    size, columns = 8, 5
    packed = PackedInputs(step(3, 2, 0), size, columns, CPU)
    for seed, (requests, pages) in enumerate([(8, 5), (1, 1), (3, 4), (7, 2)]):
        given = step(requests, pages, seed)
        packed.fill({name: held.numpy() for name, held in given.items()})
        for name, held in given.items():
            got = packed.inputs[name]
            assert got.dtype == held.dtype
            if name.startswith("block_table"):
                assert got.shape == (size, columns)
                assert torch.equal(got[:requests, :pages], held)
                continue
            if name in ("rows", "query_start"):
                assert torch.equal(got, torch.arange(size + (name == "query_start"), dtype=held.dtype))
                continue
            assert got.shape == (*held.shape[:-1], size)
            assert torch.equal(got[..., :requests], held)
            idle = -1 if name.startswith("slot") else 1 if name == "context_hint" else 0
            assert bool((got[..., requests:] == idle).all())


def test_inputs_do_not_overlap_and_are_aligned() -> None:
    packed = PackedInputs(step(3, 2, 0), 5, 3, CPU)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in packed.inputs.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    base = min(begin for begin, _ in spans)
    assert all((begin - base) % 64 == 0 for begin, _ in spans)


@pytest.mark.parametrize("size", [4, 32])
def test_of_long_block_tables_only_the_rows_of_requests_are_copied(size: int) -> None:
    columns = 4096
    like = step(3, 2, 0)
    packed, short = PackedInputs(like, size, columns, CPU), PackedInputs(like, size, 1, CPU)
    for seed, requests in enumerate([1, 3, size, 2]):
        given = step(requests, columns, seed)
        few = {name: held[:, :1] if name.startswith("block_table") else held for name, held in given.items()}
        arrays = {name: held.numpy() for name, held in given.items()}
        for following in (False, True):
            rest = short.fill({name: held.numpy() for name, held in few.items()}, following=following)
            table = 2 * 4 * columns
            more = packed.fill(arrays, following=following) - requests * table
            assert 0 <= more < rest + SPARED
        for name, held in given.items():
            if name.startswith("block_table"):
                assert torch.equal(packed.inputs[name][:requests], held)
            elif name not in ("rows", "query_start"):
                assert torch.equal(packed.inputs[name][..., :requests], held)
