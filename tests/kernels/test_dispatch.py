"""Which backend serves what, and that groups of several backends come back in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kernel_calls import asked, wanted
from thinwire.kernels import dispatch
from thinwire.kernels.base import Tables
from thinwire.kernels.dispatch import NUMBA, TORCH, kernels_for
from thinwire.kernels.matrices import Factors, MatrixGroup, Subtraction, Write
from thinwire.kernels.triton import launcher
from thinwire.kernels.triton import limits as triton_limits
from thinwire.tensors import accelerators

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
    torch.set_num_threads(2)
    try:
        assert served_by_torch(torch.ones(8, 8), 3)
    finally:
        torch.set_num_threads(1)


@pytest.fixture
def not_loaded() -> Iterator[None]:
    for found in (dispatch._load_numba, dispatch._first_that_serves):
        found.cache_clear()
    yield
    for found in (dispatch._load_numba, dispatch._first_that_serves):
        found.cache_clear()


@pytest.mark.usefixtures("not_loaded")
@needs_numba
@pytest.mark.parametrize("error", [ImportError("needs another NumPy"), RuntimeError("no locator available")])
def test_a_numba_that_does_not_work_is_told_and_products_taken(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "import_module", Mock(side_effect=error))
    with pytest.warns(UserWarning, match=rf"Numba .* can't be used \({error}\).*pip install '\.\[numba\]'"):
        assert served_by_torch(torch.ones(8, 8), 3)
    assert served_by_torch(torch.ones(8, 8), 3)  # and is not told again


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["no Numba", "not served"])
def test_without_numba_products_are_taken_in_silence_and_nothing_is_loaded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    monkeypatch.setattr(dispatch, "import_module", None)
    assert served_by_torch(torch.ones(8, 8, dtype=dtype), 3)


def test_where_nothing_serves_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "backends", (replace(TORCH, serves=lambda *_: False),))
    with pytest.raises(AssertionError, match=r"no backend of PyTorch serves torch\.float32"):
        kernels_for(torch.ones(8, 8), 4)


def counting(given: list[tuple[str, int]]) -> Tables:
    """PyTorch's tables, which note how many items a function is given at once."""

    def noted(name: str) -> Callable[[Sequence[Any]], Any]:
        def compute(items: Sequence[Any]) -> Any:
            given.append((name, len(items)))
            return getattr(dispatch.TORCH_TABLES.low_rank, name)(items)

        return compute

    names = ["products", "projections", "subtract_own", "reconstruct", "write", "orthonormal_rows"]
    functions: dict[str, Any] = {name: noted(name) for name in names}
    low_rank = replace(dispatch.TORCH_TABLES.low_rank, **functions)
    return replace(dispatch.TORCH_TABLES, low_rank=low_rank)


def test_each_backend_gets_all_its_groups_in_one_call_and_answers_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[list[tuple[str, int]]] = [[], []]
    small, large = (counting(each) for each in given)
    small_backend = replace(TORCH, serves=lambda device, dtype, rank: (rank or 0) <= 2, load=lambda: small)
    monkeypatch.setattr(dispatch, "backends", (small_backend, replace(TORCH, load=lambda: large)))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    kinds = [((6, 9), 1), ((5, 7), 3), ((4, 8), 2), ((6, 9), 4)]
    groups = [MatrixGroup(["m"], [draw(*shape)], [None], matrix_rank) for shape, matrix_rank in kinds]
    whole = [group.matrices[0].clone() for group in groups]
    rights = [draw(1, matrix_rank, shape[1]) for shape, matrix_rank in kinds]
    lefts = dispatch.products(asked(groups, rights, None, add_error=True))
    for left, right, matrix in zip(lefts, rights, whole, strict=True):
        torch.testing.assert_close(left[0], right[0] @ matrix.t())
    bases = dispatch.orthonormal_rows(lefts)
    assert [basis.shape for basis in bases] == [left.shape for left in lefts]
    owns = dispatch.projections(asked(groups, bases, None, add_error=False))
    factors = [Factors(basis, own, own) for basis, own in zip(bases, owns, strict=True)]
    dispatch.subtract_own([Subtraction(*each) for each in zip(groups, factors, strict=True)])
    for group, basis, matrix in zip(groups, bases, whole, strict=True):
        torch.testing.assert_close(group.matrices[0], matrix - basis[0].t() @ basis[0] @ matrix)
    errors = [[torch.empty_like(matrix)] for matrix in whole]
    dispatch.reconstruct(wanted(groups, errors, [[each] for each in factors], None))
    for group, each in zip(groups, factors, strict=True):
        torch.testing.assert_close(group.matrices[0], each.basis[0].t() @ each.own[0])
    in_order = ["products", "orthonormal_rows", "projections", "subtract_own", "reconstruct"]
    assert given == [[(name, 2) for name in in_order]] * 2


def test_what_lies_on_several_devices_is_served_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []
    tables = counting(given)
    monkeypatch.setattr(dispatch, "backends", (replace(TORCH, load=lambda: tables),))
    devices = ["cpu", "meta", "cpu"]
    groups = [MatrixGroup(["m"], [torch.eye(6, device=device)], [None], 2) for device in devices]
    rights = [torch.ones(1, 2, 6, device=device) for device in devices]
    lefts = dispatch.products(asked(groups, rights, None, add_error=True))
    bases = dispatch.orthonormal_rows(lefts)
    owns = dispatch.projections(asked(groups, bases, None, add_error=False))
    dispatch.write([Write(basis, own, False, None) for basis, own in zip(bases, owns, strict=True)])
    assert torch.equal(bases[0], owns[0])
    for found in (lefts, bases, owns):
        assert [each.device.type for each in found] == devices
    in_order = ["products", "orthonormal_rows", "projections", "write"]
    assert given == [(name, count) for name in in_order for count in (2, 1)]


def test_no_groups_no_work() -> None:
    assert dispatch.products(asked([], [], None, add_error=True)) == []
    assert dispatch.orthonormal_rows([]) == []


@pytest.fixture
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(accelerators, "warned", set())
    for found in (triton_limits._why_unusable, dispatch._first_that_serves):
        found.cache_clear()
    yield
    for found in (triton_limits._why_unusable, dispatch._first_that_serves):
        found.cache_clear()


@pytest.mark.usefixtures("nothing_warned")
@pytest.mark.parametrize(
    ("package", "found", "told"),
    [
        ("", "", "Triton is not installed: PyTorch's kernels serve"),
        ("triton", "3.1.0", "Triton 3.1.0 is installed, expected 3.2 or later: PyTorch's kernels serve"),
        ("triton", "3.9.0", r"Triton 3.9.0 is installed but does not compile \(no compiler\): PyTorch's"),
        ("pytorch-triton-rocm", "3.9.1", "Triton 3.9.1 is installed but does not compile"),
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


@pytest.mark.usefixtures("nothing_warned")
def test_what_triton_has_no_kernels_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_limits, "reaches", lambda device: device.type == "meta")
    like = torch.empty(1, device="meta")
    with pytest.warns(UserWarning, match=r"matrix ranks up to 32, this one is 33: PyTorch's kernels serve"):
        assert served_by_torch(like, 33)
    with pytest.warns(UserWarning, match=r"do not take torch.float64: PyTorch's kernels serve"):
        assert served_by_torch(like.double(), 4)
    # And is not told again.
    assert dispatch.code_kernels_for(like.double()) is dispatch.TORCH_TABLES.codes
    assert served_by_torch(like, 33)


@pytest.mark.usefixtures("nothing_warned")
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
    triton_limits._why_not.cache_clear()
    with pytest.warns(UserWarning, match=f"{told}: PyTorch's kernels serve"):
        assert not triton_limits.reaches(device)
    assert not triton_limits.reaches(device)  # and is not told again
    assert not triton_limits.reaches(torch.device("cpu"))


def test_the_probe_has_the_options_of_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them Triton 3.9 warns, and where warnings are errors that would pass for "does not compile"."""
    launched = Mock()
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.empty(1))  # on CUDA
    monkeypatch.setattr(launcher, "launch", launched)
    launcher.check()
    assert launched.call_args.args[3] == launcher.FUSED


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
