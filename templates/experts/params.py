"""What a graph fixes about a block of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_compile.ops.activation import KINDS


@dataclass(frozen=True)
class Params:
    """hidden, width: elements of a row and of an expert's activation. act, alpha, limit, interleaved, transposed: as in
    the operation. up_bias, down_bias: whether there are biases. align: elements, of which every row of `x` and of the
    weights starts at a multiple."""

    hidden: int
    width: int
    experts: int
    top_k: int
    dtype: torch.dtype
    ids_dtype: torch.dtype
    weights_dtype: torch.dtype
    act: str
    alpha: float
    limit: float
    interleaved: bool
    transposed: bool
    up_bias: bool
    down_bias: bool
    align: int

    def __post_init__(self) -> None:
        if min(self.hidden, self.width, self.top_k) < 1 or self.top_k > self.experts or self.act not in KINDS:
            raise ValueError(f"{self.top_k} of {self.experts} {self.act} experts of {self.hidden} x {self.width}")
