"""Held-out loss with AdamW, Muon or Lion after equally many tokens: ways to send less, each at its best rate.

Members of one process train byte GPTs with Thinwire's own algorithms and adapters; several seeds run side by
side, as lanes. Each run adds a line to a file: one that is stopped loses nothing, and `page` makes the page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from pages import RESULTS_FOLDER, markdown_table, page, spread, with_interval
from stacked import StackedGPT
from thinwire import AllReduce, Cast, DiLoCo, LocalSGD, Nesterov, PowerSGD, Quantize, Streaming, TopK
from thinwire.algorithms import Algorithm
from thinwire.comm import InProcessTransport, run_members
from thinwire.demo.gpt import GPT, SIZES, GPTConfig, heldout_loss
from thinwire.simulation import Simulation
from trainings import EXACT, command_line, cosine, percents, text, train_all, windows

RECORDS = RESULTS_FOLDER / "adamw.jsonl"
MODELS = {
    "0.14 M": GPTConfig(layers=2, heads=2, width=64, context_length=64),
    "0.7 M": GPTConfig(layers=3, heads=4, width=128, context_length=64),
    "3 M": GPTConfig(layers=4, heads=4, width=256, context_length=64),
    "10.9 M": replace(SIZES["medium"], context_length=64),
    "85 M": GPTConfig(layers=12, heads=12, width=768, context_length=64),
}
# Of all members together: so exact averaging is the same run however many share them.
WINDOWS = 8
MAX_GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05
LION_BETAS, LION_WEIGHT_DECAY = (0.9, 0.99), 0.1
HELDOUT_BATCHES = 64
FIRST_TUNING_SEED = 1_000
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Setting:
    """What runs have in common that are compared."""

    members: int = 4  # that share a step's windows
    inner: str = "AdamW"  # or "Lion"; or "Muon" for the blocks' matrices, and AdamW for the rest
    model: str = "0.14 M"  # of `MODELS`
    steps: int = 2_000  # of the inner optimizer


@dataclass(frozen=True)
class Lane:
    """One training."""

    rate: float  # the inner optimizer's peak learning rate
    seed: int  # of the start and the batches


@dataclass(frozen=True)
class Outcome:
    """What came of a training."""

    loss: float  # on held-out text, in nats a byte
    times_fewer: float  # bytes of a bf16 ring over those that were sent (and received)
    seconds: float  # of this processor, the lane's share


class Averaging:
    """Gradients averaged at every step: a bucket for each lane."""

    def __init__(self, stacked: StackedGPT, setting: Setting, rates: Sequence[float], algorithm: Algorithm):
        self._stacked = stacked
        self._simulation = Simulation(algorithm, stacked.buckets, num_workers=setting.members)
        self.optimizers = new_optimizers(stacked.models[0], setting.inner, rates)

    def step(self) -> None:
        """Step the first member's models, which stand for all members'."""
        gradients = self._stacked.gradients
        assert self._simulation.step([list(of_member) for of_member in gradients]), "a mean was not finite"
        clip(gradients[0])
        for optimizer in self.optimizers:
            optimizer.step()
        self._stacked.parameters[1:] = self._stacked.parameters[0]

    def finish(self) -> float:
        """Return how many times fewer bytes than in fp32 were sent."""
        return self._simulation.syncs[0].stats().compression_ratio


class LocalTraining:
    """Models of their own that are averaged now and then, by an adapter such as `LocalSGD`."""

    def __init__(
        self,
        stacked: StackedGPT,
        setting: Setting,
        rates: Sequence[float],
        adapter: Callable[..., LocalSGD],
    ) -> None:
        self._gradients = stacked.gradients
        self.by_member: list[list[Optimizer]] = [[] for _ in stacked.models]
        self._inside = [ExitStack() for _ in stacked.models]
        adapters: list[list[LocalSGD]] = [[] for _ in stacked.models]
        for lane, rate in enumerate(rates):
            groups = InProcessTransport.group(setting.members)
            for rank, (models, group) in enumerate(zip(stacked.models, groups, strict=True)):
                optimizers = new_optimizers(models[lane : lane + 1], setting.inner, [rate])
                self.by_member[rank] += optimizers
                adapters[rank].append(adapter(models[lane], optimizers[-1], replicas=group))
        self.optimizers = [each for optimizers in self.by_member for each in optimizers]
        self._adapter = adapters[0][0]

        def enter(rank: int) -> None:
            for each in adapters[rank]:
                self._inside[rank].enter_context(each)

        run_members(setting.members, enter)

    def step(self) -> None:
        """Step every member's models by themselves; the adapters average them when it is time."""
        clip(self._gradients)
        run_members(len(self.by_member), self._step)

    def _step(self, rank: int) -> None:
        for optimizer in self.by_member[rank]:
            optimizer.step()

    def finish(self) -> float:
        """Average what is left; return how many times fewer bytes than in fp32 were sent."""
        run_members(len(self._inside), lambda rank: self._inside[rank].close())
        return self._adapter.stats().compression_ratio


class WarmedUp:
    """Gradients averaged at every step in a warm-up, then local training: `LocalSGD`'s `Warmup`."""

    def __init__(
        self,
        stacked: StackedGPT,
        setting: Setting,
        rates: Sequence[float],
        warmup: Algorithm,
        share: float,
        local: Callable[[StackedGPT, Setting, Sequence[float]], LocalTraining],
    ) -> None:
        self._arguments = stacked, setting, rates
        self._make_local = local
        self._local: LocalTraining | None = None
        self._warmup_steps, self._steps = round(share * setting.steps), 0
        self._warmup = Averaging(*self._arguments, algorithm=warmup)
        self.optimizers = self._warmup.optimizers

    def step(self) -> None:
        self._steps += 1
        if self._local is not None:
            self._local.step()
            return
        self._warmup.step()
        if self._steps == self._warmup_steps:
            self._local = self._make_local(*self._arguments)
            # All members have made the same steps so far, and remember the same of them.
            for member in self._local.by_member:
                for own, common in zip(_states(member), _states(self._warmup.optimizers), strict=True):
                    own.update({name: value.clone() for name, value in common.items()})
            self.optimizers = self._local.optimizers

    def finish(self) -> float:
        """Average what is left; return how many times fewer bytes than in fp32 were sent."""
        assert self._local is not None
        warmup = self._warmup_steps / self._warmup.finish()
        # What LocalSGD adds where the warm-up ends: its last step's gradients, and the parameters, in fp32.
        exact = 2.0
        later = (self._steps - self._warmup_steps) / self._local.finish()
        return self._steps / (warmup + exact + later)


def _states(optimizers: Sequence[Optimizer]) -> list[dict[str, Tensor]]:
    """Return what is remembered of each parameter, in the order of lanes."""
    return [
        optimizer.state[parameter]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


Method = Callable[[StackedGPT, Setting, Sequence[float]], Averaging | LocalTraining | WarmedUp]


def averaging(algorithm: Algorithm) -> Method:
    return partial(Averaging, algorithm=algorithm)


def local(
    every_steps: int, algorithm: Algorithm | None = None, **options: Any
) -> Callable[[StackedGPT, Setting, Sequence[float]], LocalTraining]:
    adapter = partial(LocalSGD, every_steps=every_steps, algorithm=algorithm or AllReduce(), **options)
    return partial(LocalTraining, adapter=adapter)


def warmed_up(share: float, warmup: Algorithm, then: Callable[..., LocalTraining]) -> Method:
    """`then`, after a share of the steps in which gradients are averaged by `warmup`."""
    return partial(WarmedUp, warmup=warmup, share=share, local=then)


def diloco(every_steps: int, **options: Any) -> Callable[..., LocalTraining]:
    """DiLoCo as it comes, but for `options`."""
    return partial(LocalTraining, adapter=partial(DiLoCo, every_steps=every_steps, **options))


# How an adapter that averages models may stream, by the words that a method's name has for it.
STREAMING: dict[str, dict[str, Any]] = {
    "2 fragments": {"streaming": Streaming(fragments=2)},
    "1 step late": {"streaming": Streaming(delay_steps=1)},
    "1 step late, mix 0": {"streaming": Streaming(delay_steps=1, local_weight=0.0)},
    "5 steps late": {"streaming": Streaming(delay_steps=5)},
    "5 steps late, mix 0": {"streaming": Streaming(delay_steps=5, local_weight=0.0)},
    "2 fragments, 1 step late": {"streaming": Streaming(fragments=2, delay_steps=1)},
    "2 fragments, 1 step late, mix 0": {"streaming": Streaming(fragments=2, delay_steps=1, local_weight=0.0)},
    "2 fragments, 5 steps late": {"streaming": Streaming(fragments=2, delay_steps=5)},
}
METHODS: dict[str, Method] = {
    EXACT: averaging(AllReduce()),
    "bf16": averaging(Cast("bf16")),
    "PowerSGD, matrix rank 16": averaging(PowerSGD(matrix_rank=16)),
    "PowerSGD, matrix rank 4": averaging(PowerSGD(matrix_rank=4)),
    **{f"Quantize, {bits} bits": averaging(Quantize(bits=bits)) for bits in (8, 6, 5, 4, 3, 2, 1)},
    **{
        f"Quantize, {bits} bits, error feedback": averaging(Quantize(bits=bits, error_feedback=True))
        for bits in (4, 2, 1)
    },
    **{
        f"Quantize, {bits} bits, eigenbasis": averaging(Quantize(bits=bits, eigenbasis="*.blocks.*"))
        for bits in (5, 4, 3, 2)
    },
    "Quantize, 2 bits in blocks of 32, eigenbasis": averaging(
        Quantize(bits=2, block=32, eigenbasis="*.blocks.*")
    ),
    "TopK, 1/32": averaging(TopK(density=1 / 32)),
    **{f"LocalSGD every {steps}": local(steps) for steps in (1, 4, 10, 30)},
    **{f"LocalSGD every {steps}, 4 bits": local(steps, Quantize(bits=4)) for steps in (4, 10, 30)},
    **{f"LocalSGD every {steps}, 2 bits": local(steps, Quantize(bits=2)) for steps in (10, 30)},
    **{f"DiLoCo every {steps}": diloco(steps) for steps in (4, 10, 30)},
    **{
        f"DiLoCo every {steps}, outer {rate:g}, momentum {momentum:g}": diloco(
            steps, outer=Nesterov(lr=rate, momentum=momentum)
        )
        for steps in (10, 30)
        for rate, momentum in ((1.0, 0.0), (1.0, 0.3), (1.0, 0.5), (0.7, 0.6))
    },
    **{f"LocalSGD every {steps}, TopK": local(steps, TopK()) for steps in (1, 2, 5, 15)},
    **{f"LocalSGD every 5, TopK 1/{share}": local(5, TopK(density=1 / share)) for share in (2, 4, 16)},
    **{
        f"2 bits for {share:.0%} of the steps, then LocalSGD every 5, TopK": warmed_up(
            share, Quantize(bits=2), local(5, TopK())
        )
        for share in (0.05, 0.1, 0.2, 0.45)
    },
    **{
        f"2 bits for {share:.0%} of the steps, then DiLoCo every 30, outer 1, momentum 0.5": warmed_up(
            share, Quantize(bits=2), diloco(30, outer=Nesterov(lr=1.0, momentum=0.5))
        )
        for share in (0.1, 0.45)
    },
    "LocalSGD every 5, TopK, outer 0.5": local(5, TopK(), outer=Nesterov(lr=0.5, momentum=0.0)),
    "LocalSGD every 2, 2 bits": local(2, Quantize(bits=2)),
    "LocalSGD every 6, 2 bits": local(6, Quantize(bits=2)),
    "LocalSGD every 30, 4 bits, 2 fragments": local(30, Quantize(bits=4), streaming=Streaming(fragments=2)),
    "LocalSGD every 30, 4 bits, 2 fragments, 5 steps late": local(
        30, Quantize(bits=4), streaming=Streaming(fragments=2, delay_steps=5)
    ),
    **{
        f"LocalSGD every 5, TopK, {words}": local(5, TopK(), **options)
        for words, options in STREAMING.items()
        if options["streaming"].delay_steps < 5
    },
    **{
        f"DiLoCo every 30, outer 1, momentum 0.5, {words}": diloco(
            30, outer=Nesterov(lr=1.0, momentum=0.5), **options
        )
        for words, options in STREAMING.items()
    },
}


class Lion(Optimizer):
    """Moves each entry by the sign of a momentum: algorithm 2 of Chen et al. (arXiv 2302.06675)."""

    def __init__(self, groups: list[dict[str, object]]) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, lr = group["params"], group["lr"]
            gradients = [each.grad for each in parameters]
            momenta = [self.state[each].setdefault("momentum", torch.zeros_like(each)) for each in parameters]
            moves = torch._foreach_lerp(gradients, momenta, LION_BETAS[0])
            torch._foreach_sign_(moves)
            torch._foreach_mul_(parameters, 1 - lr * LION_WEIGHT_DECAY)
            torch._foreach_add_(parameters, moves, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1 - LION_BETAS[1])


def new_optimizers(models: nn.Module, inner: str, rates: Sequence[float]) -> list[Optimizer]:
    """Return what trains a member's models, with a group for each lane that remembers its peak rate."""

    def groups(of_model: Callable[[nn.Module], list[nn.Parameter]]) -> list[dict[str, object]]:
        return [
            {"params": of_model(model), "peak": rate}
            for model, rate in zip(models.children(), rates, strict=True)
        ]

    if inner == "AdamW":
        return [AdamW(groups(lambda model: list(model.parameters())), fused=True)]
    if inner == "Lion":
        return [Lion(groups(lambda model: list(model.parameters())))]
    assert inner == "Muon"
    muon = Muon(groups(lambda model: by_muon(model)[0]), adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(groups(lambda model: by_muon(model)[1]), fused=True)]


def by_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the blocks' matrices, and the rest."""
    matrices = [
        each for name, each in model.named_parameters() if name.startswith("blocks.") and each.ndim == 2
    ]
    chosen = set(matrices)
    return matrices, [each for each in model.parameters() if each not in chosen]


def clip(gradients: Tensor) -> None:
    """Scale each row to the greatest norm that is allowed, as `clip_grad_norm_` does."""
    norms = gradients.norm(dim=-1, keepdim=True)
    gradients.mul_((MAX_GRADIENT_NORM / (norms + 1e-6)).clamp_(max=1.0))


def train(
    setting: Setting,
    lanes: Sequence[Lane],
    method: Method,
    at_step: Callable[[int], None] = lambda step: None,
) -> list[Outcome]:
    """Train lanes side by side; on the same windows whatever the method and however many share them."""
    start_seconds = time.process_time()
    config = MODELS[setting.model]
    seeds, rates = [lane.seed for lane in lanes], [lane.rate for lane in lanes]
    stacked = StackedGPT(config, seeds, setting.members, DEVICE)
    training = method(stacked, setting, rates)
    for step in range(setting.steps):
        at_step(step)
        inputs, targets = batches(seeds, step, setting, config.context_length)
        if step == 0:
            stacked.check(inputs, targets)
        stacked.backward(inputs, targets)
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * cosine(step, setting.steps, warmup_share=WARMUP_SHARE)
        training.step()
    times_fewer = training.finish() / 2
    heldout = text().heldout.to(DEVICE)
    losses = [
        heldout_loss(model, heldout, batches=HELDOUT_BATCHES)
        for model in stacked.models[0].children()
        if isinstance(model, GPT)
    ]
    seconds = (time.process_time() - start_seconds) / len(lanes)
    return [Outcome(loss, times_fewer, seconds) for loss in losses]


def batches(seeds: Sequence[int], step: int, setting: Setting, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, `(members, lanes, batch, length)`."""
    drawn = [windows(text().train, WINDOWS, length, seed=seed, step=step) for seed in seeds]
    inputs, targets = (
        torch.stack(each).to(DEVICE).view(len(seeds), setting.members, -1, length).transpose(0, 1)
        for each in zip(*drawn, strict=True)
    )
    return inputs, targets


Part = TypeVar("Part", Setting, Lane, Outcome)


@dataclass(frozen=True)
class Record:
    """A line of the file: what was trained, and what came of it."""

    method: str
    setting: Setting
    lane: Lane
    outcome: Outcome

    def line(self) -> str:
        """Return what `of_line` reads."""
        return json.dumps(
            {"method": self.method, **asdict(self.setting), **asdict(self.lane), **asdict(self.outcome)}
        )

    @classmethod
    def of_line(cls, line: str) -> Record:
        """Return what `line` wrote."""
        values = json.loads(line)

        def part(kind: type[Part]) -> Part:
            return kind(**{field.name: values[field.name] for field in fields(kind)})

        return cls(values["method"], part(Setting), part(Lane), part(Outcome))


def records(path: Path) -> list[Record]:
    return [Record.of_line(line) for line in path.read_text().splitlines()] if path.exists() else []


class Together(NamedTuple):
    """Lanes that are trained in one pass."""

    method: str
    setting: Setting
    lanes: tuple[Lane, ...]

    def __str__(self) -> str:
        return self.method


def add_runs(arguments: argparse.Namespace) -> None:
    """Train what the file lacks: every rate with every seed, of each method some side by side."""
    setting = Setting(arguments.members, arguments.inner, arguments.model, arguments.steps)
    lanes = [Lane(rate, seed) for rate in arguments.rates for seed in arguments.seeds]
    done = {(each.method, each.setting, each.lane) for each in records(arguments.file)}
    together = {}
    for name in arguments.methods:
        missing = [lane for lane in lanes if (name, setting, lane) not in done]
        for start in range(0, len(missing), arguments.side_by_side):
            now = tuple(missing[start : start + arguments.side_by_side])
            together[Together(name, setting, now)] = setting.steps

    def add(part: Together, outcomes: list[Outcome]) -> None:
        with arguments.file.open("a") as file:
            for lane, outcome in zip(part.lanes, outcomes, strict=True):
                file.write(Record(part.method, setting, lane, outcome).line() + "\n")

    train_all(train_named, together, arguments.jobs, arguments.file, add)


def train_named(part: Together, at_step: Callable[[int], None]) -> list[Outcome]:
    """Train with a method of `METHODS`, in a process of its own."""
    return train(part.setting, part.lanes, METHODS[part.method], at_step)


def by_setting(found: Sequence[Record]) -> dict[Setting, list[Record]]:
    return {
        setting: [each for each in found if each.setting == setting]
        for setting in dict.fromkeys(each.setting for each in found)
    }


def made_page(file: Path) -> str:
    found = by_setting(records(file))
    sections = [
        f"## {section_title(setting)}\n\n{table(setting, found)}"
        for setting in found
        if compared(found[setting])
    ]
    return page("AdamW with less to send, after equally many tokens", EXPLANATION, *sections)


EXPLANATION = (
    "A byte GPT (2 layers, width 64: 0.14 M parameters; 3 layers, width 128: 0.7 M; 6 layers, width 384: "
    "10.9 M; 4 layers, width 256: 3 M; context 64) on the standard library of this Python. A step takes "
    f"{WINDOWS} windows of all members together, so exact "
    "averaging is the same training however many share them. AdamW as torch has it (weight decay 0.01, "
    f"betas 0.9 and 0.999), Lion with weight decay {LION_WEIGHT_DECAY:g} and betas 0.9 and 0.99; the "
    f"gradient norm is clipped to {MAX_GRADIENT_NORM:g}; the learning rate "
    f"rises for {WARMUP_SHARE:.0%} of the steps, then falls along a cosine to nothing. Loss in nats a "
    f"byte on {16 * HELDOUT_BATCHES:,} fixed windows of files not trained on, ± standard deviation over "
    "seeds. Gaps are taken seed by seed: mean, and the 95 % interval of the mean (Student's t). Each "
    "method runs at the peak rate that was best of those tried, on seeds from 1,000 on, which the "
    "comparison does not use; if only one was tried, it is the rate of exact averaging. Bytes are "
    "those of a bf16 ring over the method's, scales, indices and whole tensors counted, of what a "
    "member sends and receives."
)


def section_title(setting: Setting) -> str:
    return f"{setting.model}, {setting.members} members, {setting.inner}, {setting.steps:,} steps"


def compared(of_setting: Sequence[Record]) -> dict[str, list[Record]]:
    """Return by method the runs of seeds below 1,000, at the rate that is best on the others."""
    chosen: dict[str, list[Record]] = {}
    for name in dict.fromkeys(record.method for record in of_setting):
        of_method = [record for record in of_setting if record.method == name]
        rates = {record.lane.rate for record in of_method if record.lane.seed < FIRST_TUNING_SEED}
        by_rate = {rate: tuning_loss(of_method, rate) for rate in rates}
        if by_rate:
            best = min(by_rate, key=lambda rate: by_rate[rate])
            runs = [each for each in of_method if each.lane.rate == best]
            chosen[name] = [each for each in runs if each.lane.seed < FIRST_TUNING_SEED]
    return chosen


def tuning_loss(of_method: Sequence[Record], rate: float) -> float:
    losses = [
        each.outcome.loss
        for each in of_method
        if each.lane.rate == rate and each.lane.seed >= FIRST_TUNING_SEED
    ]
    return fmean(losses) if losses else math.inf


def losses_by_seed(runs: Sequence[Record]) -> dict[int, float]:
    return {each.lane.seed: each.outcome.loss for each in runs}


def table(setting: Setting, found: dict[Setting, list[Record]]) -> str:
    """One row a method; gaps to exact averaging with the same inner optimizer, and with AdamW."""
    by_method = compared(found[setting])
    baselines = {"gap to exact": losses_by_seed(by_method.get(EXACT, []))}
    if setting.inner != "AdamW":
        with_adamw = compared(found.get(replace(setting, inner="AdamW"), []))
        baselines["gap to exact AdamW"] = losses_by_seed(with_adamw.get(EXACT, []))
    header = [
        "method",
        "peak rate",
        "of those tried",
        "times fewer bytes than bf16",
        "seeds",
        "held-out loss",
    ]
    rows = []
    for name, runs in sorted(by_method.items(), key=lambda each: each[1][0].outcome.times_fewer):
        tried = sorted({each.lane.rate for each in found[setting] if each.method == name})
        losses = losses_by_seed(runs)
        gaps = [with_interval(percents(losses, exact)) for exact in baselines.values()]
        if name == EXACT:
            gaps[0] = ""
        rows.append(
            [
                name,
                f"{runs[0].lane.rate:g}",
                " ".join(f"{rate:g}" for rate in tried),
                f"{runs[0].outcome.times_fewer:.1f}",
                str(len(runs)),
                spread(list(losses.values()), ".4f"),
                *gaps,
            ]
        )
    return markdown_table([*header, *baselines], rows)


def main() -> None:
    parser, training = command_line(__doc__, RECORDS, add_runs, made_page, "adamw")
    training.add_argument("methods", nargs="+", choices=tuple(METHODS))
    training.add_argument("--members", type=int, default=4)
    training.add_argument("--inner", choices=("AdamW", "Muon", "Lion"), default="AdamW")
    training.add_argument("--model", choices=tuple(MODELS), default="0.14 M")
    training.add_argument("--steps", type=int, default=2_000)
    training.add_argument("--rates", type=float, nargs="+", default=[2e-3], help="peak learning rates")
    training.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="for tuning: from 1000 on"
    )
    training.add_argument("--side-by-side", type=int, default=5, help="trainings in one pass")
    training.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
