"""What a run of the demo is asked to do, checked once, before anything starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.algorithms import Algorithm
from thinwire.algorithms.registry import REGISTRY
from thinwire.checks import processes_here, whole_number
from thinwire.demo.model import SIZES
from thinwire.errors import ConfigError

ALGORITHMS = {registered.name: registered for registered in REGISTRY}
SEEDS = 1 << 64


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The settings of a run.

    Attributes:
        processes: Training processes on this machine.
        steps: Training steps of each algorithm.
        algorithms: Names out of `ALGORITHMS`, trained one after the other.
        matrix_rank: Of the low-rank factors, for the algorithms that have them.
        model_size: A name out of `thinwire.demo.model.SIZES`.
        seed: Of the initial model and of the batches.
        output: The folder that records and logs are written to.
    """

    processes: int = 2
    steps: int = 250
    algorithms: tuple[str, ...] = ("fp16", "quantize", "powersgd")
    matrix_rank: int = 4
    model_size: str = "small"
    seed: int = 0
    output: Path = Path("thinwire-demo")

    def __post_init__(self) -> None:
        processes_here("processes", self.processes, minimum=2)
        whole_number("steps", self.steps, minimum=1)
        whole_number("seed", self.seed, minimum=0)
        if self.seed >= SEEDS:
            raise ConfigError(f"seed must be below 2**64, which torch's generators take, got {self.seed}")
        _check_choice("model_size", self.model_size, tuple(SIZES))
        if not self.algorithms:
            raise ConfigError(f"got no algorithms, expected at least one of {', '.join(ALGORITHMS)}")
        for name in self.algorithms:
            _check_choice("algorithm", name, tuple(ALGORITHMS))
            if self.algorithms.count(name) > 1:
                raise ConfigError(f"got algorithm={name!r} twice, expected each name once")
            # Its settings are refused here, before anything is started.
            self.algorithm(name)

    def algorithm(self, name: str) -> Algorithm:
        """Return the algorithm of a name, with this run's settings."""
        # Those that have no such setting leave it aside.
        return ALGORITHMS[name].made(matrix_rank=self.matrix_rank)

    def record_path(self, algorithm: str) -> Path:
        """Return where the steps trained with `algorithm` are recorded."""
        return self.output / f"{algorithm}.jsonl"

    def to_json(self) -> str:
        """Return a line that `from_json` reads: how options travel to the training processes."""
        return json.dumps({**asdict(self), "output": str(self.output)})

    @classmethod
    def from_json(cls, line: str) -> DemoOptions:
        """Return the options that `to_json` wrote."""
        fields = json.loads(line)
        # JSON has neither tuples nor paths.
        fields.update(algorithms=tuple(fields["algorithms"]), output=Path(fields["output"]))
        return cls(**fields)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
