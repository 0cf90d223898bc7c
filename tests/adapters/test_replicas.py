"""Whether all processes hold the same model, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from processes import in_each_process
from thinwire.adapters import replicas
from thinwire.adapters.replicas import fingerprint


def test_one_changed_bit_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every type and layout, in pieces or at once, and two rows that have changed places."""
    plain = torch.arange(1.0, 25.0).view(4, 6)
    kinds = [plain, plain.bfloat16(), plain.double(), plain.t(), torch.complex(plain, plain), plain.bool()]
    for tensor in kinds:
        before = fingerprint([tensor]).tolist()
        assert fingerprint([tensor.clone()]).tolist() == before
        other = tensor.clone()
        other[2, 3] = 0
        assert fingerprint([other]).tolist() != before
        permuted = tensor.clone()
        permuted[[1, 2]] = tensor[[2, 1]]
        assert torch.equal(permuted, tensor) or fingerprint([permuted]).tolist() != before
    assert fingerprint([torch.tensor(0.0)]).tolist() != fingerprint([torch.tensor(-0.0)]).tolist()
    monkeypatch.setattr(replicas, "WORDS_AT_ONCE", 5)
    assert fingerprint([plain]).tolist() == fingerprint([plain.clone()]).tolist()


@in_each_process(2)
def test_processes_whose_models_drift_apart_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
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
