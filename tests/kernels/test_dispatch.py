"""Which backend serves what."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from unittest.mock import Mock, patch

import pytest
import torch

from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import NUMBA, TORCH, kernels_for
from thinwire.kernels.triton import limits as triton_limits

needs_numba = pytest.mark.skipif(
    find_spec("numba") is None, reason="NO NUMBA HERE: nothing compiled was tested"
)


def served_by_torch(like: torch.Tensor, matrix_rank: int) -> bool:
    return kernels_for(like, matrix_rank) is dispatch.TORCH_TABLES.low_rank


@needs_numba
def test_numba_serves_fp32_one_thread_and_small_matrix_ranks() -> None:
    numba = NUMBA.load()
    assert numba is not None
    assert kernels_for(torch.ones(8, 8), 4) is numba.low_rank is not dispatch.TORCH_TABLES.low_rank
    assert served_by_torch(torch.ones(8, 8), 5)
    assert served_by_torch(torch.ones(8, 8).double(), 4)
    assert served_by_torch(torch.ones(8, 8, device="meta"), 4)
    with patch("torch.get_num_threads", lambda: 2):
        assert served_by_torch(torch.ones(8, 8), 3)


@pytest.fixture
def nothing_told() -> Iterator[None]:
    """As in a new process."""
    of_triton = triton_limits.why_unusable, triton_limits._why_out_of_reach, triton_limits.warn_fallback
    asked = dispatch._load_numba, dispatch._first_that_serves, *of_triton
    for found in asked:
        found.cache_clear()
    yield
    for found in asked:
        found.cache_clear()


@pytest.mark.usefixtures("nothing_told")
@needs_numba
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ImportError("needs another NumPy"), r"pip install '\.\[numba\]'"),
        (RuntimeError("no locator available"), "set NUMBA_CACHE_DIR"),
    ],
)
def test_a_numba_that_does_not_work_is_told_and_products_taken(
    error: Exception, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "import_module", Mock(side_effect=error))
    with pytest.warns(UserWarning, match=rf"Numba .* can't be used \({error}\).*{fix}"):
        assert served_by_torch(torch.ones(8, 8), 3)
    assert served_by_torch(torch.ones(8, 8), 3)  # and is not told again


@pytest.mark.usefixtures("nothing_told")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["no Numba", "not served"])
def test_without_numba_products_are_taken_in_silence_and_nothing_is_loaded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    monkeypatch.setattr(dispatch, "import_module", None)
    assert served_by_torch(torch.ones(8, 8, dtype=dtype), 3)


@pytest.mark.usefixtures("nothing_told")
@pytest.mark.parametrize(
    ("package", "found", "told"),
    [
        ("", "", "Triton is not installed: PyTorch's kernels are used"),
        ("triton", "3.1.0", "Triton 3.1.0 is installed, expected 3.2 or later: PyTorch's kernels are used"),
        ("triton", "3.9.0", r"Triton 3.9.0 is installed but does not compile \(no compiler\): PyTorch's"),
        ("pytorch-triton", "3.7.0+git", r"Triton 3.7.0\+git is installed but does not compile"),
    ],
)
def test_where_triton_lacks_pytorch_serves_and_says_so_once(
    package: str, found: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != package:
            raise PackageNotFoundError(name)
        return found

    failing = Mock(side_effect=RuntimeError("no compiler\nin any place"))
    monkeypatch.setattr(triton_limits, "version", version)
    monkeypatch.setattr(triton_limits, "import_module", failing)
    monkeypatch.setattr(triton_limits, "reaches", lambda device: device.type == "meta")
    monkeypatch.setattr(dispatch, "backends", (dispatch.TRITON, TORCH))
    like = torch.empty(1, device="meta")
    with pytest.warns(UserWarning, match=told):
        assert dispatch.code_kernels_for(like) is dispatch.TORCH_TABLES.codes
    assert dispatch.code_kernels_for(like) is dispatch.TORCH_TABLES.codes  # and is not told again


@pytest.mark.usefixtures("nothing_told")
@pytest.mark.parametrize(
    ("device", "told"),
    [
        (torch.device("cuda", 99), r"Tesla V100 has compute capability \(7, 0\), which is below 8.0"),
        (torch.device("mps"), r"Triton's kernels are for CUDA and ROCm, and this device is of type mps"),
        (torch.device("xpu"), r"Triton's kernels are for CUDA and ROCm, and this device is of type xpu"),
    ],
    ids=str,
)
def test_a_device_that_triton_does_not_reach_is_told(
    device: torch.device, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.warns(UserWarning, match=f"{told}: PyTorch's kernels are used"):
        assert not triton_limits.reaches(device)
    assert not triton_limits.reaches(device)  # and is not told again
    assert not triton_limits.reaches(torch.device("cpu"))


@pytest.mark.parametrize(("hip", "kind"), [(None, "sm_90"), ("6.4", "gfx942")])
def test_the_kind_of_gpu_is_part_of_what_members_compare(
    hip: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Mock(major=9, minor=0, gcnArchName="gfx942")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(dispatch, "backends", (dispatch.Backend("Triton", TORCH.load, lambda: "3.6.0"),))
    like = Mock(torch.Tensor, device=torch.device("cuda"), dtype=torch.float32)
    assert dispatch.name_of_kernels_for(like, 4) == f"Triton 3.6.0 on {kind}"
