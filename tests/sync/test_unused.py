"""Which parameters a process has used."""

from __future__ import annotations

import pytest
import torch

from thinwire.algorithms import Bucket
from thinwire.plan import ParameterSpec
from thinwire.sync.unused import used_flags
from thinwire.tensors import accelerators

SIZES = {"zeros": 300, "last": 300, "empty": 0, "nan": 1, "tiny": 3}


def bucket_on(device: str) -> Bucket:
    specs = tuple(ParameterSpec.of(name, torch.empty(size, device="meta")) for name, size in SIZES.items())
    return Bucket(specs, torch.zeros(sum(SIZES.values()), device=device))


def test_a_gradient_that_is_not_all_zeros_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_on("cpu")
    _, last, _, nan, tiny = bucket.gradients
    last[299], nan[0], tiny[1] = -2.0, torch.nan, 1e-30
    flags = used_flags(bucket)
    assert flags.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    assert torch.equal(used_flags(bucket), flags)
