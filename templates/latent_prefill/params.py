"""What a graph fixes about latent attention of prompts, and what tuning may choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Params:
    """nope, rope: elements of a query's two parts. latent, value: elements of a cache row's first part and of a head's
    result. page: tokens of a page. value_rows: the up-projection of values lies with its latent elements side by side.
    align: elements, of which every row starts at a multiple."""

    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    page: int
    dtype: torch.dtype
    scale: float
    value_rows: bool
    align: int

    def __post_init__(self) -> None:
        if min(self.heads, self.nope, self.rope, self.latent, self.value) < 1 or not self.scale > 0:
            raise ValueError(f"{self.heads} heads of {self.nope} + {self.rope}, scale {self.scale}")


@dataclass(frozen=True)
class Config:
    """block_m, block_n: new tokens of a tile of attend, and keys that it reads at a time. expand_m: tokens of a tile of
    expand, expand_k latent elements at a time. past_m: new tokens of a tile of absorb and merge, past_k elements of
    their weights at a time, past_heads heads a program; and of look_back rows of a tile, each a head of a token, and
    tiles a program, past_n cached rows at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    expand_m: int
    expand_k: int
    expand_warps: int
    expand_stages: int
    past_m: int
    past_n: int
    past_k: int
    past_heads: int
    past_warps: int
    past_stages: int
