"""Which tokens of a step the layers above a boundary run on, in a bundle built to keep the last rows of prompts.

Of a prompt of L tokens these are the ones from position L - keep on, a page start or more of them: what windows hold is
then whole pages, and a request that begins at a page start can be described by its page table alone. A request whose
logits are wanted further up (prompt_logprobs) keeps all of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.runtime.batch import PAGE_SIZE, StepInput


def kept_inputs(inputs: StepInput, keep: int) -> dict[str, Tensor]:
    """`kept` i64[K], indices into the step's tokens, and `kept_start` i64[R], the first position of each request that
    is kept."""
    starts = inputs.query_start.long()
    request = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    first = inputs.context_hint[starts[:-1]]
    start = (first - keep).clamp(min=0) // PAGE_SIZE * PAGE_SIZE  # `first_kept` of each
    owner = request[inputs.rows]
    start[owner[inputs.position_ids[inputs.rows] < start[owner]]] = 0
    return {"kept": torch.nonzero(inputs.position_ids >= start[request]).flatten(), "kept_start": start}


def first_kept(prompt: int, keep: int) -> int:
    """The first token that is kept of a prompt of so many."""
    return max(0, prompt - keep) // PAGE_SIZE * PAGE_SIZE


def in_prompt(inputs: StepInput) -> bool:
    """Whether some token of a step is followed by more of its prompt, so that windows before it may lack rows."""
    return bool((inputs.position_ids + 1 < inputs.context_hint).any())
