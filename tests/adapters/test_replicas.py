"""Whether all processes hold the same model, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from processes import in_each_process


@in_each_process(2)
def test_processes_whose_models_drift_apart_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    # A quantized weight is of a subclass; so is a parameter of a tensor with its own class.
    model.own = nn.Parameter(torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})))
    model.quantized = type("Quantized", (nn.Parameter,), {})(torch.zeros(2, dtype=torch.int8), False)
    thinwire.check_replicas(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.bias[2] = torch.nextafter(model.bias[2], torch.tensor(1.0))
    with pytest.raises(thinwire.AgreementError) as caught:
        thinwire.check_replicas(model)
    assert dist.get_world_size() == 2
    assert "of 1 of 2 processes (ranks 1) differ from process 0" in str(caught.value)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(thinwire.ConfigError, match=r"expected the model, a torch\.nn\.Module, got 3"):
        thinwire.check_replicas(3)  # type: ignore[arg-type]
