"""What random lines are made of: {a}, {b} tensors, {f} floating, {i} whole, {m} masks, {n} a Python number, {o} what
the line gives. A line that eager refuses is not taken, so every template may be tried on anything.
"""

from __future__ import annotations


def _templates(text: str) -> tuple[str, ...]:
    return tuple(" ".join(text.split()).split(" | "))


VIEWS = _templates(
    """
    {a}.transpose(0, -1) | {a}.transpose(-1, -2) | {a}.mT | {a}.t() | {a}.movedim(0, -1) | {a}.permute(1, 0, 2) |
    {a}[..., ::2] | {a}[1:] | {a}[:-1] | {a}[0] | {a}[..., -1] | {a}[:, 1:] | {a}[None] | {a}[..., None] |
    {a}.select(-1, 0) | {a}.narrow(0, 0, 1) | {a}.diagonal() | {a}.unbind(0)[0] | {a}.split(2, -1)[0] |
    {a}.chunk(2, -1)[-1] | {a}.unfold(-1, 2, 2) | {a}.unflatten(-1, (2, -1)) | {a}.view_as({a}) | {a}.detach() |
    {a}.squeeze() | {a}.unsqueeze(1) | {a}.flatten() | {a}.reshape(-1) | {a}.reshape({a}.shape[0], -1) |
    {a}.view({a}.shape[0], -1) | {a}.expand(2, *{a}.shape) | {a}.expand_as({b}) | {a}.flatten(0, 1) |
    {a}.swapaxes(0, 1) | {a}.contiguous() | {a}.to({a}.dtype) | {a}.type_as({b}) | {a}
    """
)
VALUES = _templates(
    """
    torch.tanh({f}) | {f}.abs() | -{f} | {f} * 0.5 | {f} + 1 | torch.sin({f}) | {f}.clamp(-2.0, 2.0) | 1.5 - {f} |
    {f} / 3 | {a}.clone() | {a}.clone() | {f}.float() | {f}.to(torch.bfloat16) | {f}.double() | {f}.cumsum(-1) |
    {f}.sum(-1) | {f}.mean(0) | {f}.amax(-1, keepdim=True) | {f}.sum() | torch.zeros_like({a}) | {a}.flip(0) |
    {f}.new_ones({f}.shape) | torch.empty_like({f}).fill_(0.5) | {a}.repeat(2, *(1,) * ({a}.dim() - 1)) |
    {a}.roll(1, 0) | {f} + {f} | {f} * {f} | {f} - {f} | torch.maximum({f}, {f}) | torch.where({m}, {f}, {f}) |
    {f} @ {f} | torch.cat([{a}, {a}], -1) | torch.stack([{a}, {a}]) | torch.cat([{f}, {f}], 0) |
    torch.einsum('...i,...i', {f}, {f}) | {f} + torch.arange({f}.shape[-1]) | {f} * torch.tensor([1.0, -2.0]) |
    {f} + torch.tensor(0.25) | {f} * {n} | {f} + {f}.shape[0] | torch.full_like({f}, {n}) |
    {f}.masked_fill({m}, 0.25) | {f}.index_select(0, {i}.flatten() * 0) |
    {f}.index_add(0, torch.tensor([0, 0]), {f}[:2]) | {f}.scatter(-1, {i} * 0, 1.0) | {a}.contiguous() + 0 | {i} + 1 |
    {i} * 2 | {i}.remainder(3) | {i}.sum() | {i}.float() | torch.arange({a}.shape[0]) | {i}.cumsum(0) | {i} > 1 |
    ~{m} | {m} & {m} | {m}.any(-1) | {m}.long() | torch.ones({a}.shape[-1], dtype=torch.bool).tril()
    """
)
WRITES = _templates(
    """
    {f}.add_(1) | {f}.mul_(0.5) | {f}.tanh_() | {a}.copy_({a}) | {a}.zero_() | {f}.fill_(2.0) | {f}[0] = 1.0 |
    {f}[..., 0] = {f}[..., 1] | {f}.transpose(0, 1).add_(1) | {f}[1:].mul_(2) | {f}.clamp_(-1, 1) | {f}.neg_() |
    {f}.masked_fill_({m}, 0.25) | {f}.index_add_(0, torch.tensor([0]), {f}[:1]) | {f}.select(0, 0).zero_() |
    {f}.index_copy_(0, torch.tensor([0]), {f}[:1]) | {f}.diagonal().fill_(1.0) | {f}.view(-1)[0] = 0.0 | {i}.add_(1) |
    {m}.logical_not_() | {f}.sub_({f}) | {f}.flatten()[1:].add_(0.5) | {f}.data.mul_(0.5) | {f}.add_({f}.shape[0]) |
    {f}.mul_({n})
    """
)
BLOCKS = (
    "{o} = {a}.as_strided((2, 2), (1, 2))",
    "with torch.no_grad():\n    {o} = {f} * 2",
    "with torch.enable_grad():\n    {o} = {f} - 2",
    "with torch.autocast('cpu', torch.bfloat16):\n    {o} = {f} @ {f}",
    "{o} = torch.vmap(lambda row: row * 2)({f})",
    "{o} = [v * 2 for v in {f}.unbind(0)][0]",
    "{o}, _ = torch.max({f}, -1)",
)
RESULTS = _templates(
    """
    {a} | {a} | {a} | ({a}, {a}) | {'first': {a}, 'second': {a}} | [{a}, None] | {a}.shape[0] | {n} | 3 | {a} * 1
    """
)
