"""Predictions, the rule by which `advise` and `auto` choose one, and the lines of code to use it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.advice.losses import UNKNOWN_LOSS, ExpectedLoss
from thinwire.checks import number, whole_count
from thinwire.errors import ConfigError

MAX_BUDGET_LOSS = 0.2  # a larger number was probably meant in percent
MAX_SLOWDOWN = 1.1  # a prediction up to this much slower ties with the fastest
# It sends the same messages as `Cast("bf16")`, at the same time, without Thinwire.
NATIVE = "native HSDP in bf16"
NATIVE_LINES = (
    "from torch.distributed.fsdp import MixedPrecisionPolicy\n"
    "fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
)
# It replaces the parameters: an optimizer made before would train the old ones.
SHARDING = 'fully_shard(model, mesh=mesh["shard"])\n# make the optimizer here, of the shards\n'
# By framework, with its usual names.
LINES = {
    "DDP": "thinwire.attach(ddp_model, {})",
    "FSDP2": SHARDING + 'thinwire.attach(model, {}, replicas=mesh["replicate"])',
    "Accelerate": "model, optimizer = accelerator.prepare(model, optimizer)\nthinwire.attach(model, {})",
    "Lightning": "from thinwire.integrations.lightning import ThinwireCallback, ThinwireStrategy\n"
    "trainer = Trainer(strategy=ThinwireStrategy({}), callbacks=[ThinwireCallback()])",
    "Trainer": "from thinwire.integrations.transformers import attach\n"
    "thinwire_callback = attach(trainer, {})",
}


def code_of(name: str, framework: str = "DDP") -> str:
    """Return the lines that use an algorithm."""
    return NATIVE_LINES if name == NATIVE else LINES[framework].format(f"thinwire.{name}")


@dataclass(frozen=True)
class Prediction:
    """The cost of an algorithm: predicted, or measured in the run by `auto`.

    Attributes:
        name: The algorithm, as written in code.
        code: The line to add.
        step_seconds: The predicted median.
        low_seconds: A quarter of the steps would be faster than this.
        high_seconds: A quarter of them would be slower than this.
        sent_bytes: Bytes that a process sends on the wire per step; it receives as many. For a sharded model,
            those of all processes of a replica.
        memory_bytes: Bytes that it keeps between steps.
        is_lossy: Whether the mean is rougher than 16 bits.
        residual_bytes: Bytes that a process averages exactly when the state is saved.
        loss: The expected gap to exact averaging's loss.
        rounds: Messages of a step that wait for one another.
        seconds_at: `step_seconds` by the link's round trip in ms, at the probed rate. Empty for backends
            other than Gloo: the number of round trips per message is then unknown.
    """

    name: str
    code: str
    step_seconds: float
    low_seconds: float
    high_seconds: float
    sent_bytes: float
    memory_bytes: int
    is_lossy: bool
    residual_bytes: int = 0
    loss: ExpectedLoss = UNKNOWN_LOSS
    rounds: int = 0
    seconds_at: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether it is exact averaging, which DDP does itself."""
        return self.loss.kind == "exact"


def checked_budget(budget_loss: object) -> float:
    """Return a loss budget as a share; `math.inf` for any."""
    budget = number("budget_loss", budget_loss, minimum=0)
    if MAX_BUDGET_LOSS < budget < math.inf:
        most = f"a share of at most {MAX_BUDGET_LOSS}, or math.inf for any"
        meant = "if that is meant as percent, write 0.01 for one percent"
        raise ConfigError(f"budget_loss must be {most}, got {budget_loss}; {meant}")
    return budget


def checked_gain(least_gain: object) -> float:
    """Return the least time that an approximation must save, as a share of a step."""
    gain = number("least_gain", least_gain, minimum=0)
    if gain >= 1:
        raise ConfigError(f"least_gain must be a share below 1, such as 0.05 for 5 %, got {least_gain}")
    return gain


def checked_steps(total_steps: object) -> int | None:
    """Return the steps of a run, if they are known."""
    return None if total_steps is None else whole_count("total_steps", total_steps, minimum=1)


def choose(contenders: Sequence[Prediction]) -> Prediction:
    """Return the contender that loses least; among equal losses, the one that sends the most bits."""

    def order(prediction: Prediction) -> tuple[float, bool, float]:
        loss = prediction.loss.order if prediction.is_lossy else 0.0
        return loss, not prediction.is_exact, -prediction.sent_bytes

    return min(contenders, key=order)


def contenders(
    predictions: Sequence[Prediction],
    least_gain: float,
    budget_loss: float = math.inf,
    compute_seconds: float = 0.0,
) -> list[Prediction]:
    """Return the fastest prediction within the budget, first, and those that tie with it.

    Exact and 16-bit averaging lose nothing. A rougher algorithm must win more than `least_gain` over both,
    and clearly: quartiles must not overlap. If even no averaging would not win that much over exact
    averaging, faster predictions are due to chance.
    """
    exact = [prediction for prediction in predictions if prediction.is_exact]
    if exact and compute_seconds > (1 - least_gain) * exact[0].step_seconds:
        return exact
    careful = _tied([prediction for prediction in predictions if not prediction.is_lossy], least_gain)
    max_seconds = (1 - least_gain) * careful[0].step_seconds
    rough = [
        prediction
        for prediction in predictions
        if prediction.is_lossy
        and prediction.step_seconds < max_seconds
        and prediction.high_seconds < careful[0].low_seconds
        # Without a bound, algorithms with an unknown gap stay.
        and prediction.loss.order <= 100 * budget_loss
    ]
    return _tied(rough, least_gain) if rough else careful


def _tied(predictions: Sequence[Prediction], least_gain: float) -> list[Prediction]:
    """Return the fastest, first, and those over which it wins at most `least_gain`, or not clearly."""
    fastest, *slower = sorted(predictions, key=lambda prediction: prediction.step_seconds)
    # With noisy steps, quartiles overlap even at half the speed: no gap in loss is worth that much time.
    near_seconds = MAX_SLOWDOWN * fastest.step_seconds
    return [fastest] + [
        prediction
        for prediction in slower
        if fastest.step_seconds >= (1 - least_gain) * prediction.step_seconds
        or (prediction.low_seconds <= fastest.high_seconds and prediction.step_seconds <= near_seconds)
    ]
