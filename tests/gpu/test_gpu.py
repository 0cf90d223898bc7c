"""On a GPU everything does what it does on the CPU. Needs one GPU; says so where there is none.

Two Gloo processes share the GPU, so that something is averaged; NCCL runs with one process.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from kernel_calls import Drawing, check_a_step
from processes import in_each_process
from thinwire import AllReduce, PowerSGD, TopK
from thinwire.algorithms import Algorithm, BatchedPowerSGD
from thinwire.algorithms.error_feedback import ERROR
from thinwire.comm import InProcessTransport
from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import code_kernels_for, entry_kernels_for, kernels_for
from thinwire.kernels.matrices import Rows
from thinwire.kernels.torch_codes import CODES
from thinwire.kernels.torch_kernels import LOW_RANK
from thinwire.kernels.triton import triton_codes, triton_entries, triton_kernels
from thinwire.kernels.triton.limits import OLDEST_CAPABILITY, warn_fallback
from thinwire.plan import ParameterSpec
from thinwire.sync import Engine
from thinwire.sync.settings import HostCheck
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS
from thinwire.tensors.entries import EntryLayout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: nothing was tested on one")


on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


STEPS = 5


def exact_products() -> None:
    """TF32 would round what is compared. The older setting warns in some versions that have the newer one."""
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def new_module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Conv2d(3, 24, 3), nn.Flatten(), nn.Linear(24 * 16, 40), nn.Tanh(), nn.Linear(40, 40)]
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, step: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    batch = torch.randn(8, 3, 6, 6, generator=generator)
    loss: Tensor = model(batch.to(device, dtype)).float().square().mean()
    return loss


def gap(one: list[Tensor], other: list[Tensor]) -> float:
    flat = [torch.cat([tensor.detach().cpu().double().view(-1) for tensor in side]) for side in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@on_each_device
@pytest.mark.parametrize("algorithm", [AllReduce(), PowerSGD(matrix_rank=2)], ids=str)
@in_each_process(2)
def test_sharded_models_overlap_to_the_same_result(algorithm: Algorithm, device: str) -> None:
    """Two replicas of one shard each: on one GPU no more can be."""
    exact_products()
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard"))
    trained = []
    for overlaps in (True, False):
        model: Any = new_module().to(device)
        for layer in (model[2], model[4], model):
            fully_shard(layer, mesh=mesh["shard"])
        sync = thinwire.attach(model, algorithm, replicas=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            # Where a forward call never comes back, gradients leave when the backward pass has ended.
            if not overlaps:
                loss_of(model, step, device)
            torch.autograd.backward(loss_of(model, step, device))
            optimizer.step()
        trained.append([p.to_local().detach().cpu() for p in model.parameters()])
    assert gap(*trained) < 1e-6
    assert sync.steps == STEPS
    assert isinstance(algorithm, AllReduce) or sync.stats().compression_ratio > 1.2


@on_each_device
@in_each_process(2)
def test_an_overflow_under_a_grad_scaler(device: str) -> None:
    model = DistributedDataParallel(new_module().to(device))
    scaler = GradScaler(device, init_scale=2.0**10)
    sync = thinwire.attach(model, PowerSGD(matrix_rank=2), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * torch.inf
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
    assert (sync.stats().steps, sync.stats().nonfinite_steps) == (STEPS, 1)
    assert all(p.isfinite().all() for p in model.parameters())
    assert scaler.get_scale() == 2.0**9


@on_each_device
@in_each_process(2)
def test_state_moves_between_devices(device: str) -> None:
    exact_products()
    models = [DistributedDataParallel(new_module().to(place)) for place in ("cpu", device)]
    syncs = [thinwire.attach(model, PowerSGD(matrix_rank=2)) for model in models]
    gradients: list[list[Tensor]] = [[], []]
    for step in range(STEPS):
        if step == 3:
            syncs[1].load_state_dict(syncs[0].state_dict())
        for model, place, kept in zip(models, ("cpu", device), gradients, strict=True):
            model.zero_grad()
            torch.autograd.backward(loss_of(model, step, place))
            kept[:] = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    assert gap(gradients[1], gradients[0]) < 1e-3


@needs_gpu
@pytest.mark.parametrize("algorithm", [PowerSGD(matrix_rank=2), BatchedPowerSGD(), TopK()], ids=str)
@pytest.mark.parametrize("host_check", [True, False, "auto"])
def test_one_host_synchronisation_a_step_or_none(algorithm: Algorithm, host_check: HostCheck) -> None:
    """Counted by CUDA itself, over NCCL with one process."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        # Low rank does without it by default.
        waits = host_check is True or (host_check == "auto" and isinstance(algorithm, TopK))
        assert _synchronisations(algorithm, host_check) == int(waits)
    finally:
        dist.destroy_process_group()


def _synchronisations(algorithm: Algorithm, host_check: HostCheck) -> int:
    model = DistributedDataParallel(new_module().cuda(), bucket_cap_mb=0.02)
    thinwire.attach(model, algorithm, host_check=host_check)
    losses: list[Any] = []
    for step in range(STEPS):
        losses = [loss_of(model, step, "cuda")]
        if step < STEPS - 1:
            torch.autograd.backward(losses[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.autograd.backward(losses[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@needs_gpu
@pytest.mark.parametrize("built_on_it", [True, False])
@pytest.mark.parametrize("trained_on_it", [True, False])
@in_each_process(2)
def test_gradients_of_side_streams(built_on_it: bool, trained_on_it: bool) -> None:
    """DDP runs hooks on the stream that it was built on; Lightning builds it on one and trains on another.

    Train behind work that keeps the streams busy, and once more without any of this.
    """
    exact_products()
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    trained = []
    busy = torch.ones(4096, 4096, device="cuda")
    for built, used in ((built_on_it, trained_on_it), (False, False)):
        side, usual = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side if built else usual):
            model = DistributedDataParallel(new_module().cuda(), bucket_cap_mb=0.02)
        sync = thinwire.attach(model, PowerSGD(matrix_rank=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.cuda.synchronize()
        with torch.cuda.stream(side if used else usual):
            for step in range(STEPS):
                busy.mm(busy)
                optimizer.zero_grad()
                torch.autograd.backward(loss_of(model, step, "cuda"))
                optimizer.step()
        torch.cuda.synchronize()
        trained.append([p.detach().clone() for p in model.parameters()])
    assert gap(*trained) < 1e-5
    assert sync.stats().compression_ratio > 2


@needs_gpu
def test_triton_serves_where_it_can() -> None:
    """Or says why not: a GPU of this time, with torch's own Triton, has no excuse."""
    like, layout = torch.empty(16, device="cuda"), EntryLayout((16,), 16, 1 / 16, bits=2)
    if torch.version.hip or torch.cuda.get_device_capability() >= OLDEST_CAPABILITY:
        assert kernels_for(like, 4) is kernels_for(like.bfloat16(), 32) is triton_kernels.LOW_RANK
        assert code_kernels_for(like) is triton_codes.CODES
        assert entry_kernels_for(like.bfloat16(), layout) is triton_entries.ENTRIES
        assert not warn_fallback.cache_info().currsize
    else:
        assert kernels_for(like, 4) is LOW_RANK
        assert warn_fallback.cache_info().currsize


@needs_gpu
@pytest.mark.parametrize("healthy", [None, True, False])
@pytest.mark.parametrize("matrix_rank", [1, 4, 8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_is_that_of_float64(dtype: torch.dtype, matrix_rank: int, healthy: bool | None) -> None:
    exact_products()
    of_triton = kernels_for(torch.empty(1, device="cuda"), 4)
    for kernels in [of_triton, *([LOW_RANK] if dtype == torch.float32 else [])]:
        check_a_step(
            kernels, [(700, 256), (60, 99)], matrix_rank, dtype=dtype, healthy=healthy, device="cuda"
        )


@needs_gpu
@pytest.mark.parametrize("matrix_rank", [1, 4, 8, 32])
def test_bases_by_triton_are_those_of_pytorch(matrix_rank: int) -> None:
    rows = Drawing("cuda")(2, matrix_rank, 700)
    found = [
        kernels.orthonormal_rows([Rows(rows.clone())])[0] for kernels in (kernels_for(rows, 4), LOW_RANK)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("bits", CODEBOOKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_by_triton_are_those_of_pytorch(bits: int, dtype: torch.dtype) -> None:
    flat, codebook = Drawing("cuda")(2 * 700 * 256).to(dtype), CODEBOOKS[bits]
    blocks = Blocks((700 * 256 - 3, 3 + 700 * 256), 64, 2)
    coded = code_kernels_for(flat).encoded(flat, blocks, codebook)
    # PyTorch on a GPU multiplies by the inverse. For fewer bits a scale is a sum, in another order.
    expected = CODES.encoded(flat.cpu(), blocks, codebook).message
    assert bits < 4 or torch.equal(coded.message.cpu(), expected)
    decoded = [torch.empty_like(flat) for _ in range(2)]
    for codes, target in zip((code_kernels_for(flat), CODES), decoded, strict=True):
        codes.decode([coded], blocks, codebook, target)
    assert torch.equal(*decoded)
    assert coded.message.nbytes < 4 * len(flat) / 3


@needs_gpu
@pytest.mark.parametrize("bits", [2, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_entries_by_triton_are_those_of_pytorch(
    dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = tuple(
        ParameterSpec.of(str(numel), torch.empty(numel, dtype=dtype)) for numel in (3 * 4096, 1, 5003)
    )
    found = []
    for backends in (dispatch.backends, (dispatch.TORCH,)):
        monkeypatch.setattr(dispatch, "backends", backends)
        engine = Engine(TopK(bits=bits), InProcessTransport.group(1)[0], specs)
        draw = torch.Generator("cuda").manual_seed(0)
        for _ in range(3):
            # No two of a chunk have one magnitude: of those any may be sent.
            order = torch.rand(5, 4096, device="cuda", generator=draw).argsort(1).view(-1)
            bits_of_each = (0x3C00 + order[: sum(spec.numel for spec in specs)]).short()
            flat = bits_of_each.view(torch.float16 if dtype == torch.float32 else dtype).to(dtype)
            assert engine.average([(specs, flat)])
            found.append(flat)
        found += [engine.state.memory[ERROR][spec.name] for spec in specs]
    assert all(map(torch.equal, found[:6], found[6:]))
    assert 0 < found[0].count_nonzero() < len(found[0]) / 50


@needs_gpu
def test_what_does_not_overlap_is_timed_by_events() -> None:
    start = time.perf_counter()
    specs = (ParameterSpec.of("weight", torch.empty(400, 300, device="cuda")),)
    engine = Engine(PowerSGD(matrix_rank=2), InProcessTransport.group(1)[0], specs)
    for _ in range(STEPS):
        engine.average([(specs, torch.randn(400 * 300, device="cuda"))])
    torch.cuda.synchronize()
    assert 0 < engine.reporter.stats().exposed_seconds < time.perf_counter() - start
