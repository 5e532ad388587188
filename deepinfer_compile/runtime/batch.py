"""What one model step consumes: packed tokens and where their cache rows live.

The layouts are those of every cached operation (`ops/attention.py`): T tokens of R requests are packed without padding,
request r owns tokens `query_start[r]:query_start[r + 1]`, and its newest token is at position `seq_len[r] - 1`.
Cache rows live in pages of `PAGE_SIZE` tokens. Layers that keep the whole context and layers that keep only a window
have their own page pools, called cache groups, because a window layer gives pages back as the window moves on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from deepinfer_compile.runtime.drawing import Draw, Numbers
    from deepinfer_compile.runtime.page_rows import Form, PageRows
    from deepinfer_compile.runtime.pages import Ints

PAGE_SIZE = 64
"""Tokens in one cache page."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose cache rows have one lifetime.

    `window` is 0 where the whole context is kept, else the number of newest positions a query may read (its own
    included). `bytes_per_page` sums over all layers of the group.
    """

    name: str
    window: int
    bytes_per_page: int


@dataclass(frozen=True)
class GroupMeta:
    """Where the tokens of one step live in one cache group.

    block_table: i32[R, P], the page that holds logical page p of request r, -1 where there is none (past the end, or
    given back because it left the window). slot: i64[T], page * PAGE_SIZE + offset of each new token, -1 for padding.
    """

    block_table: Tensor
    slot: Tensor


@dataclass(frozen=True)
class StepInput:
    """One step of R requests with T packed new tokens.

    input_ids, position_ids: i64[T]. rows: i64[N], indices into the T tokens whose logits are wanted, in order.
    query_start: i32[R + 1]. seq_len: i32[R], context length including the new tokens. context_hint: i64[T], the length
    of the longest sequence the request had when its prompt was read (max(prompt length, position + 1)), for rotary
    forms that depend on length (LongRoPE). groups: one entry per cache group, in the order of `Executor.groups`.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    query_start: Tensor
    seq_len: Tensor
    context_hint: Tensor
    groups: tuple[GroupMeta, ...]


class Flight(Protocol):
    """A step under way. logits: of its rows, good until the next step starts."""

    @property
    def logits(self) -> Tensor: ...

    def tokens(self) -> Ints:
        """Wait for the step; a token for each of its rows, -1 without a finite maximum. Once."""
        ...


class Executor(Protocol):
    """Runs the programs of a loaded bundle.

    draw: what chooses tokens where the logits are, if anything does. reads_hint: whether cache rows depend on
    `StepInput.context_hint`. keep: rows at the end of a prompt of which windows are whole, 0 for all. identity: of what
    decides cache rows beside their tokens, the same in every process that would compute the same rows; empty where it
    is not known.
    """

    draw: Draw | None
    reads_hint: bool
    keep: int
    identity: str
    groups: tuple[CacheGroup, ...]
    vocab_size: int
    max_model_len: int

    def allocate(self, pages: tuple[int, ...]) -> None:
        """Allocate the caches: `pages[g]` pages for group g. Contents are undefined."""
        ...

    def page_form(self, group: int) -> Form:
        """Where the caches of a group are in the bytes of a page."""
        ...

    def read_pages(self, group: int, pages: Sequence[int]) -> Tensor:
        """A copy of the rows of pages of a group on the host, u8[pages, bytes of its form]."""
        ...

    def host_memory(self, size: int) -> Tensor:
        """So many bytes on the host, u8, from which the caches' device copies by itself."""
        ...

    def write_pages(self, group: int, pages: Sequence[int], rows: Sequence[PageRows]) -> int:
        """Put rows that `read_pages` gave, here or elsewhere, into pages; how many, from the first on: it ends before
        those that are not of the group's form."""
        ...

    def step(self, inputs: StepInput) -> Tensor:
        """Run one step; return logits [N, vocab]. Writes the new tokens' cache rows.

        They are f32 on the host; with `draw`, of the model's type on its device, and good until the next step.
        """
        ...

    def start(self, inputs: StepInput, numbers: Numbers, *, following: bool = False) -> Flight | None:
        """Start a step that also chooses a token for each of its rows, as `step` and then `draw` would.

        following: in place of `inputs.input_ids`, it reads the tokens of the step started last, request by request.
        When a third step starts, the first one's tokens are lost. None where steps of this kind (or any, as without a
        `draw`) only run to their end.
        """
        ...
