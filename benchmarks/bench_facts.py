"""Where do the hooks that people have today fail, and what does Thinwire do in the same case?

Every figure comes from fresh processes with a real Gloo group, once with PyTorch's code and once with ours; a
process that has not ended in time hangs, and is killed. What is measured are defects of one version on one
processor: others may show others. What Thinwire promises is tested in `tests/`.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import thinwire
from pages import markdown_table, page, save
from progress import Progress
from thinwire import hooks

GROUP_TIMEOUT_SECONDS = 20.0
LIMIT_SECONDS = 60.0

Figure: TypeAlias = Callable[["Side"], str]


@dataclass(frozen=True)
class Side:
    """The same names, of PyTorch or of Thinwire."""

    name: str

    @property
    def is_ours(self) -> bool:
        return self.name == "Thinwire"

    def named(self, name: str) -> Any:
        """A hook, a wrapper or a state class."""
        if self.is_ours:
            return getattr(hooks, name)
        return getattr(powerSGD_hook if hasattr(powerSGD_hook, name) else default_hooks, name)

    def state(self, **settings: Any) -> Any:
        """A `PowerSGDState` that compresses from the first step at which PyTorch's can."""
        return self.named("PowerSGDState")(None, **({"start_powerSGD_iter": 2} | settings))

    def hooked(self, model: nn.Module, *, hook: str = "powerSGD_hook", **settings: Any) -> tuple[Any, Any]:
        """A DDP model with a hook, and its state."""
        wrapped, state = DistributedDataParallel(model), self.state(**settings)
        wrapped.register_comm_hook(state, self.named(hook))
        return wrapped, state

    def error_of(self, state: Any) -> Tensor:
        """A state's residual, all parameters in one."""
        residual = dict(state.state_dict()["error"]) if self.is_ours else state.error_dict
        return torch.cat([each.reshape(-1) for each in residual.values()])


PYTORCH, THINWIRE = Side("PyTorch"), Side("Thinwire")


class Given(nn.Module):
    """A model whose gradients are what it is called with."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(each) for each in gradients)

    def forward(self, *gradients: Tensor) -> Tensor:
        products = [(weight * each).sum() for weight, each in zip(self.weights, gradients, strict=True)]
        return torch.stack(products).sum()


class HalfUsed(nn.Module):
    """A model with a layer that its forward pass leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers(32, 48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def layers(*widths: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def train(model: nn.Module, width: int, steps: range) -> None:
    """Backward passes, on each process of its own batches."""
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randn(8, width)).square().mean().backward()


def averaged(
    side: Side, gradients: Sequence[Tensor], *, hook: str = "powerSGD_hook", **settings: Any
) -> list[Tensor]:
    """What the first compressed step makes of gradients, here of a process group of equal ones."""
    model, _ = side.hooked(Given(gradients), hook=hook, **settings)
    for _ in range(3):
        model.zero_grad()
        model(*gradients).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def gathered(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def agreed(model: nn.Module) -> bool:
    """Whether the parameters are the same on all processes, to the bit."""
    first, *others = gathered(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return all(torch.equal(first, other) for other in others)


# The figures, each measured on every process of a group.


def several_buckets(side: Side) -> str:
    model, state = DistributedDataParallel(layers(*[64] * 6), bucket_cap_mb=0.01), side.state()
    model.register_comm_hook(state, side.named("powerSGD_hook"))
    train(model, 64, range(10))
    first, *others = gathered(next(p.grad for p in model.parameters() if p.grad is not None))
    return "works" if all(torch.equal(first, other) for other in others) else "gradients differ"


def batched_hook(side: Side) -> str:
    averaged(side, [torch.ones(64, 64)], hook="batched_powerSGD_hook")
    return "works"


def one_overflow(side: Side) -> str:
    scaler = GradScaler("cpu", init_scale=2.0**10)
    model, _ = side.hooked(layers(32, 48, 16), matrix_approximation_rank=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    taken = 0
    for step in range(40):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        factor = torch.inf if step == 10 and dist.get_rank() == 1 else 1.0
        loss = model(torch.randn(8, 32)).square().mean() * factor
        torch.autograd.backward(scaler.scale(loss))
        before = next(model.parameters()).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        taken += step > 10 and not torch.equal(before, next(model.parameters()))
    return f"{taken} of 29"


def halved_loss_scale(side: Side) -> str:
    scaler = GradScaler("cpu", init_scale=1024.0)
    gradient = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    ours: dict[str, Any] = {"grad_scaler": scaler} if side.is_ours else {}
    model, _ = side.hooked(Given([gradient]), **ours)
    norms = []
    for scale in [*[1024.0] * 12, 512.0]:
        model.zero_grad()
        loss = model(gradient)
        scaler.scale(loss)  # before the first, there is no scale to set
        scaler.update(scale)
        torch.autograd.backward(scaler.scale(loss))
        (weight,) = model.parameters()
        assert weight.grad is not None
        norms.append(float(weight.grad.norm()) / scale)
    return f"{norms[-2]:.1f} → {norms[-1]:.1f}"


def zero_gradient(side: Side, matrix_rank: int) -> str:
    low = torch.outer(torch.arange(1.0, 65), torch.arange(1.0, 49))
    zero, other = averaged(side, [torch.zeros(64, 48), low], matrix_approximation_rank=matrix_rank)
    nan = [name for name, each in (("zero", zero), ("low rank", other)) if bool(each.isnan().any())]
    return f"NaN in {' and '.join(nan)}" if nan else "no NaN"


def low_rank_gradient(side: Side) -> str:
    torch.manual_seed(0)
    gradient = torch.randn(64, 1) @ torch.randn(1, 48)
    (result,) = averaged(side, [gradient], matrix_approximation_rank=2, use_error_feedback=False)
    return f"{float((result - gradient).norm() / gradient.norm()):.1g}"


def resumed(side: Side, **how: Any) -> str:
    """Saved by `torch.save`, loaded by `torch.load`, used in a new DDP model."""
    model, state = side.hooked(layers(32, 48, 16))
    train(model, 32, range(4))
    file = io.BytesIO()
    torch.save(state.state_dict() if side.is_ours else state, file)
    file.seek(0)
    loaded = torch.load(file, **how)
    other = DistributedDataParallel(layers(32, 48, 16))
    if side.is_ours:
        new_state = side.state()
        new_state.load_state_dict(loaded)
        loaded = new_state
    other.register_comm_hook(loaded, side.named("powerSGD_hook"))
    for each in (model, other):
        train(each, 32, range(4, 6))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return "goes on to the bit" if all(torch.equal(_of(a), _of(b)) for a, b in pairs) else "goes on otherwise"


def _of(parameter: Tensor) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else parameter.grad


def scalar_parameter(side: Side) -> str:
    _, scalar = averaged(side, [torch.ones(64, 48), torch.tensor(3.0)])
    return "works" if float(scalar) == 3 else f"{float(scalar)} for 3"


def uneven_inputs(side: Side) -> str:
    """Gradients of process 1, whose 5 steps are 2 more than those of process 0."""
    model = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    model.register_comm_hook(None, side.named("allreduce_hook"))
    context = thinwire.join(model, False) if side.is_ours else model.join(divide_by_initial_world_size=False)
    seen = []
    with context:
        for _ in range((3, 5)[dist.get_rank()]):
            model.zero_grad()
            model(torch.ones(1, 5)).sum().backward()
            seen.append(f"{float(_of(next(model.parameters()))[0, 0]):g}")
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, " ".join(seen))
    return str(everyone[1])


def memory_under_fp16_wrapper(side: Side) -> str:
    model, state = DistributedDataParallel(layers(64, 48)), side.state()
    model.register_comm_hook(state, side.named("fp16_compress_wrapper")(side.named("powerSGD_hook")))
    train(model, 64, range(4))
    return str(side.error_of(state).dtype).removeprefix("torch.")


def growing_error(side: Side) -> str:
    """A low-rank gradient that all share, and noise of their own."""

    def noise(step: int) -> Tensor:
        shared = torch.randn(48, 2, generator=torch.Generator().manual_seed(step))
        draws = torch.Generator().manual_seed(7_000 + 2 * step + dist.get_rank())
        return shared @ torch.ones(2, 32) + torch.randn(48, 32, generator=draws)

    model, state = side.hooked(Given([noise(0)]), matrix_approximation_rank=2)
    norms = []
    for step in range(402):
        model.zero_grad()
        model(noise(step)).backward()
        if step in (101, 401):
            mine = float(side.error_of(state).norm())
            norms.append(max(float(each) for each in gathered(torch.tensor(mine))))
    return f"{norms[0]:.0f} → {norms[1]:.0f}"


def bf16_hook(side: Side) -> str:
    model = DistributedDataParallel(layers(32, 16))
    model.register_comm_hook(None, side.named("bf16_compress_hook"))
    train(model, 32, range(2))
    return "works"


def unused_parameters(side: Side) -> str:
    model = DistributedDataParallel(HalfUsed(), find_unused_parameters=True, bucket_cap_mb=0.005)
    model.register_comm_hook(side.state(), side.named("powerSGD_hook"))
    train(model, 32, range(5))
    return "works"


def default_settings(side: Side) -> str:
    """Gradient elements over those sent: of PyTorch's default state, and of `thinwire.attach`."""
    model = DistributedDataParallel(layers(64, 64, 64))
    if side.is_ours:
        sync = thinwire.attach(model, thinwire.PowerSGD())
        train(model, 64, range(10))
        return f"{sync.stats().compression_ratio:.1f}"
    state = powerSGD_hook.PowerSGDState(None)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, 64, range(10))
    ratio = state.compression_stats()[0]  # type: ignore[no-untyped-call]
    return f"{ratio or 1.0:.1f}"  # which is 0 as long as nothing is compressed


def _own_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        train(model, 32, range(step, step + 1))
        optimizer.step()


def two_counters(side: Side) -> str:
    """Of 8 steps, those after which the processes' models differ: averaged every 2 steps after a warm-up."""
    model = DistributedDataParallel(layers(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = []
    if side.is_ours:
        with thinwire.LocalSGD(model, optimizer, every_steps=2, warmup=thinwire.Warmup(2)):
            for step in range(8):
                _own_steps(model, optimizer, range(step, step + 1))
                apart += [] if agreed(model) else [str(step + 1)]
        return ", ".join(apart)
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post  # noqa: PLC0415

    state = post.PostLocalSGDState(None, None, 2, False)  # type: ignore[no-untyped-call]
    model.register_comm_hook(state, post.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=6)
    for step in range(8):
        _own_steps(model, optimizer, range(step, step + 1))
        averager.average_parameters(model.parameters())
        apart += [] if agreed(model) else [str(step + 1)]
    return ", ".join(apart)


def average_now(side: Side, disturb: Callable[[nn.Module], None] = lambda model: None) -> str:
    """Two steps of each process's own, something that users do, and an averaging."""
    model = layers(32, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExitStack() as opened:
        average: Callable[[], object] = partial(
            PeriodicModelAverager(period=2).average_parameters, model.parameters()
        )
        if side.is_ours:
            average = opened.enter_context(thinwire.LocalSGD(model, optimizer, every_steps=100)).average
        _own_steps(model, optimizer, range(2))
        disturb(model)
        before = [parameter.data_ptr() for parameter in model.parameters()]
        average()
        moved = before != [parameter.data_ptr() for parameter in model.parameters()]
        return ("averaged" if agreed(model) else "models differ") + (", storage moved" if moved else "")


def all_gradients_gone(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def one_gradient_gone(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def skipped_step(side: Side) -> str:
    """Of 5 steps, each process's counted ones, where process 0 has skipped one for an overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package compiles functions with torch.jit as it is imported
        from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415
    model, scaler = layers(32, 16), GradScaler("cpu", init_scale=2.0**8)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExitStack() as opened:
        if side.is_ours:
            counter: Any = opened.enter_context(
                thinwire.LocalSGD(model, optimizer, every_steps=100, grad_scaler=scaler)
            )
        else:
            counter = PeriodicModelAverager(period=100, warmup_steps=100)
            optimizer = PostLocalSGDOptimizer(optimizer, counter)
        for step in range(5):
            optimizer.zero_grad()
            factor = torch.inf if step == 2 and dist.get_rank() == 0 else 1.0
            torch.autograd.backward(scaler.scale(model(torch.ones(8, 32)).square().mean() * factor))
            scaler.step(optimizer)
            scaler.update()
        counted: list[Any] = [None] * 2
        dist.all_gather_object(counted, counter.steps if side.is_ours else counter.step)
    return " and ".join(str(each) for each in counted)


def lightning_on_the_cpu(side: Side) -> str:
    """Steps that a hook of ours saw of 6, by a strategy that was given it."""
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment  # noqa: PLC0415
    from lightning.pytorch import Trainer  # noqa: PLC0415
    from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: PLC0415
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    from thinwire.integrations.lightning import ThinwireStrategy  # noqa: PLC0415

    state = hooks.PowerSGDState(None, start_powerSGD_iter=0)
    strategy_class = ThinwireStrategy if side.is_ours else DDPStrategy
    strategy = strategy_class(ddp_comm_state=state, ddp_comm_hook=hooks.powerSGD_hook)
    told = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        trainer = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[TorchElasticEnvironment()],
            strategy=strategy,
            max_steps=6,
            limit_val_batches=0,
            enable_model_summary=False,
            **plain,  # type: ignore[arg-type]
        )
        trainer.fit(BoringModel())
    return str(state.stats().steps)


LOCAL_WARMUP = "local SGD, a warm-up of 2 steps (PyTorch's two counters: 2 and 6): apart after"
UNEVEN = "`join`, not dividing by the initial world size, with a hook: gradients of 1, 5 and 3 steps"
LOW_RANK = "relative error, gradient of rank 1, matrix rank 2, no error feedback"
# By number: what it is, and how it is measured.
FACTS: list[tuple[str, str, Figure]] = [
    ("1", "PowerSGD hook, 5 buckets on Gloo: runs", several_buckets),
    ("2", "batched PowerSGD hook, first compressed step", batched_hook),
    ("3", "steps taken after one overflow under a `GradScaler`", one_overflow),
    ("4", "norm of the same gradient, the loss scale halved", halved_loss_scale),
    ("5", "a zero gradient and one of rank 1, matrix rank 1", partial(zero_gradient, matrix_rank=1)),
    ("5", "the same, matrix rank 2", partial(zero_gradient, matrix_rank=2)),
    ("6", LOW_RANK, low_rank_gradient),
    ("7", "resume in a new DDP model, `torch.load(file)`", resumed),
    ("7", "the same, `torch.load(file, weights_only=False)`", partial(resumed, weights_only=False)),
    ("8", "a scalar parameter", scalar_parameter),
    ("9", UNEVEN, uneven_inputs),
    ("10", "error memory under the fp16 wrapper", memory_under_fp16_wrapper),
    ("11", "norm of the error after 100 → 400 compressed steps", growing_error),
    ("12", "bf16 hook on the CPU", bf16_hook),
    ("12", "`find_unused_parameters` with the PowerSGD hook", unused_parameters),
    ("13", "compression ratio of 10 steps as it comes", default_settings),
    ("15", LOCAL_WARMUP, two_counters),
    ("15", "local SGD, steps counted of 5, one skipped by process 0", skipped_step),
    ("15", "averaging the parameters", average_now),
    ("15", "the same after `zero_grad(set_to_none=True)`", partial(average_now, disturb=all_gradients_gone)),
    ("15", "the same, one parameter without a gradient", partial(average_now, disturb=one_gradient_gone)),
    ("16", "steps of 6 that a hook sees, Lightning on the CPU", lightning_on_the_cpu),
]
# Processes of each run; of all others one run of two.
SEVERAL_RUNS: dict[Figure, Sequence[int]] = {several_buckets: (2, 2, 2, 4, 4, 4)}


# Processes


def measured(figure: Figure, side: Side) -> str:
    """A figure, of one run or of several."""
    world_sizes = SEVERAL_RUNS.get(figure, (2,))
    told = Counter(told_by_all(figure, side, world_size) for world_size in world_sizes)
    several = len(world_sizes) > 1
    return ", ".join(f"{count} × {each}" if several else each for each, count in told.most_common())


def told_by_all(figure: Figure, side: Side, world_size: int) -> str:
    """What fresh processes tell of a figure; where they differ, all of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "thinwire"])
    # Ctrl-C reaches all processes; this one ends the others, which have from their server what that ignores.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)
    with TemporaryDirectory() as folder:
        running = [
            context.Process(target=_tell, args=(figure, side, rank, world_size, Path(folder)), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in running:
                process.start()
            deadline, told = time.monotonic() + LIMIT_SECONDS, set()
            for rank, process in enumerate(running):
                process.join(max(0.0, deadline - time.monotonic()))
                answer = Path(folder, str(rank))
                how = "hangs" if process.is_alive() else "dies"
                told.add(answer.read_text() if answer.exists() else how)
        finally:
            for process in running:
                if process.pid is not None:
                    process.kill()
                    process.join()
    return " / ".join(sorted(told))


def _tell(figure: Figure, side: Side, process_rank: int, world_size: int, folder: Path) -> None:
    """Join a group and measure; the kind of an error is a figure too."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=process_rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
    )
    assert dist.get_world_size() == world_size
    try:
        told = figure(side)
    except Exception as error:
        hangs = re.search("timed? ?out", str(error), re.IGNORECASE)
        told = "hangs" if hangs else type(error).__name__
    Path(folder, str(process_rank)).write_text(told)
    os._exit(0)  # what a defect has left behind can't end in order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NUMBER", help="these facts, and no page is written")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    facts = [each for each in FACTS if not arguments.only or each[0] in arguments.only]
    with Progress(len(facts)) as progress:
        for number, fact, figure in facts:
            progress.show(len(rows), f"fact {number}")
            figures = [measured(figure, side) for side in (PYTORCH, THINWIRE)]
            rows.append([f"{number}. {fact}", *figures])
            print(*rows[-1], sep=" | ", flush=True)
    if arguments.only:
        return
    text = page(
        "What fails where",
        f"Thinwire {thinwire.__version__}, Lightning {version('lightning')}. Gloo, 2 processes "
        "(fact 1: 2 and 4), one thread each. The numbers are those of the tests' names (`test_facts_3_…`). "
        "PowerSGD starts at step 2, the first that PyTorch's accepts.",
        markdown_table(["fact", "PyTorch", "Thinwire"], rows),
    )
    print(save(text, "facts"), flush=True)


if __name__ == "__main__":
    main()
