"""Measures a device: is its arithmetic right, with which kernels, and how long is a step of GPT-2 small?"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import median
from unittest.mock import patch

import torch

from thinwire.algorithms import Algorithm, AllReduce, Cast, PowerSGD, Quantize
from thinwire.errors import CommunicationError
from thinwire.kernels import dispatch
from thinwire.kernels.matrices import Factors, MatmulBatch, MatrixGroup, Reconstruction, Rows
from thinwire.plan import ParameterSpec
from thinwire.selfcheck.training_checks import CheckContext, gap
from thinwire.sync import Engine, Settings
from thinwire.sync.precision import full_precision
from thinwire.tensors.accelerators import wait_for

RANKS = (1, 4, 32)
ALGORITHMS = [AllReduce(), Cast("bf16"), Quantize(bits=4), *(PowerSGD(matrix_rank=rank) for rank in RANKS)]
UNTIMED_STEPS, TIMED_STEPS = 5, 5  # the first ones compile kernels, agree on plans, and allocate memory

# Measured on one H100 (docs/results.md); launches: tests/gpu_ready/test_launches.py.
COST_WITHOUT_TRITON = "which take 20 times as long for 4 bits, and 11 times the launches for low rank"

Row = dict[str, str | float]


def gpt2_small() -> list[tuple[ParameterSpec, ...]]:
    """Return a 28 MB bucket for each layer's gradients without norms, and one for the embeddings."""
    layer = {"qkv": [2304, 768], "attention": [768, 768], "up": [3072, 768], "down": [768, 3072]}
    layer |= {f"{name}.bias": shape[:1] for name, shape in layer.items()}
    shapes = {f"{number}.{name}": shape for number in reversed(range(12)) for name, shape in layer.items()}
    shapes |= {"positions": [1024, 768], "tokens": [50257, 768]}
    specs = [ParameterSpec.of(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]
    return [tuple(specs[at : at + len(layer)]) for at in range(0, len(specs), len(layer))]


def measure(context: CheckContext, buckets: list[tuple[ParameterSpec, ...]]) -> dict[str, list[Row]]:
    """Return rows of arithmetic, of steps, and of failures, after which the rest continues. Collective."""
    page: dict[str, list[Row]] = {"arithmetic": [], "steps": [], "failures": []}
    parts = [("arithmetic", f"matrix rank {rank}", partial(_arithmetic, context, rank)) for rank in RANKS]
    parts += [("steps", str(kind), partial(_step, context, buckets, kind)) for kind in ALGORITHMS]
    for table, name, part in parts:
        if context.transport.rank == 0:
            context.say(f"measuring {table} of {name}")
        try:
            page[table].append({"of": name, **part()})
        except Exception as error:  # any error: a page with a gap is better than none
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            is_lost = isinstance(error, CommunicationError)  # later collectives would wait in vain
            instead = "" if is_lost else _instead(context, part)
            page["failures"].append({"of": f"{table}, {name}", "why": why, "instead": instead})
            context.say(f"{table} of {name} failed: {why}{instead and '; '}{instead}")
            if is_lost:
                break
    return page


def _instead(context: CheckContext, part: Callable[[], Row]) -> str:
    """Return the kernels that could replace the failing ones, and their cost."""
    package = "Triton" if context.device.type == "cuda" else "Numba"
    cost = COST_WITHOUT_TRITON if package == "Triton" else "about half as fast on one thread"
    try:
        with patch.object(dispatch, "backends", (dispatch.TORCH,)):
            # With several processes, others may not have failed, and would not take part in a second try.
            row = part() if context.transport.size == 1 else {}
    except Exception:  # then the kernels are not the cause
        return "PyTorch's kernels fail, too: nothing serves instead"
    if "milliseconds" in row:
        cost = f"{row['milliseconds']:.2f} ms a step"
    return f"a training would end there; without {package} PyTorch's kernels are used, {cost}"


def _arithmetic(context: CheckContext, matrix_rank: int) -> Row:
    # Drawn on the CPU in float64, so that every device gets the same matrices.
    generator = torch.Generator().manual_seed(matrix_rank)
    exact, residual = (
        torch.randn(1, 384, 256, generator=generator, dtype=torch.float64, device="cpu") for _ in range(2)
    )
    start = torch.linalg.qr(
        torch.randn(256, matrix_rank, generator=generator, dtype=torch.float64, device="cpu")
    ).Q.T
    matrix, error, right = (drawn.float().to(context.device) for drawn in (exact, residual, start[None]))
    group = MatrixGroup(["matrix"], list(matrix), list(error), matrix_rank)
    exact += residual  # as the first product does on the device
    with full_precision(context.device):  # steps do so, too; otherwise this would measure TF32 if it is on
        kernels = dispatch.kernels_for(matrix, matrix_rank)
        (left,) = kernels.products([MatmulBatch(group, right, None, add_error=True)])
        (basis,) = kernels.orthonormal_rows([Rows(left)])
        (own,) = kernels.projections([MatmulBatch(group, basis, None, add_error=False)])
        factors = Factors((basis, own), (basis, own))
        kernels.reconstruct([Reconstruction(group, list(error), [factors], None)])
    basis = torch.linalg.qr(exact @ start.T).Q
    expected = exact - basis @ (basis.mT @ exact)
    return {"error": gap(error.cpu(), expected), "kernels": dispatch.name_of_kernels_for(matrix, matrix_rank)}


def _step(context: CheckContext, buckets: list[tuple[ParameterSpec, ...]], algorithm: Algorithm) -> Row:
    specs = chain.from_iterable(buckets)
    engine = Engine(algorithm, context.transport, specs, Settings(host_check="auto"))
    gradients = [torch.randn(sum(spec.numel for spec in bucket), device=context.device) for bucket in buckets]
    copies = [torch.empty_like(gradient) for gradient in gradients]  # steps work in place
    copy = partial(torch._foreach_copy_, copies, gradients)
    copied = _seconds(context.device, copy)
    both = _seconds(context.device, copy, lambda: engine.average(zip(buckets, copies, strict=True)))
    return {"milliseconds": 1e3 * (both - copied), "copies of the gradients": both / copied - 1}


def _seconds(device: torch.device, *calls: Callable[[], object]) -> float:
    def run() -> None:
        for call in calls:
            call()
        wait_for(device)

    return median(timeit.repeat(run, number=1, repeat=UNTIMED_STEPS + TIMED_STEPS)[UNTIMED_STEPS:])
