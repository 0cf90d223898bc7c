"""Whether what was received is finite."""

from __future__ import annotations

import torch

from thinwire.kernels.dispatch import kernels_for
from thinwire.tensors import accelerators


def all_finite(*tensors: torch.Tensor) -> torch.Tensor:
    """Return whether every element of every tensor is finite, as a tensor of one bool; not read back.

    Tensors without elements are finite. They may lie on several devices; the answer is on the first one's.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    if not kinds:
        return torch.tensor(True)
    answers = []
    for (device, _), alike in kinds.items():
        if accelerators.pays_per_launch(device):
            # As they lie: kernels are told where a tensor begins and how long it is.
            whole = [tensor.contiguous() for tensor in alike]
            answers.append(kernels_for(alike[0], 1).all_finite(whole))
        else:
            # NaN wins every minimum and maximum, so extremes are enough.
            extremes = torch.stack([each for tensor in alike for each in torch.aminmax(tensor)])
            answers.append(extremes.isfinite().all())
    if len(answers) == 1:
        return answers[0]
    return torch.stack([each.to(answers[0].device, non_blocking=True) for each in answers]).all()
