"""What the network looks like: how many machines and processes, and how fast the links are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.checks import whole_number
from thinwire.errors import ConfigError
from thinwire.lab.relay import Delays

# Addresses end in 1 to 254.
MAX_MACHINES = 200
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MIN_BITS_PER_SECOND, MAX_BITS_PER_SECOND = 10**5, 10**11
# What may pass at once after a pause: as little as can be, or short messages would not meet the rate at all.
# But a packet that is handed to the link may have 64 KiB, and a busy kernel may be a millisecond late.
MIN_BURST_BYTES = 68 * 2**10
BURST_SECONDS = 1e-3
QUEUE_SECONDS = 0.1  # what waits for longer is dropped
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MAX_LATENCY_SECONDS, MAX_LOSS = 2.0, 0.5


def bits_per_second(rate: str) -> float:
    """Return the bits per second that a rate such as "100mbit" means.

    Examples:
        >>> bits_per_second("1.5gbit")
        1500000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate.lower())
    bits = float(match[1]) * UNITS[match[2]] if match is not None else 0.0
    if not MIN_BITS_PER_SECOND <= bits <= MAX_BITS_PER_SECOND:
        raise ConfigError(
            f"a rate is like 100mbit, 1gbit or 500kbit, from 100kbit to 100gbit; got {rate[:40]!r}"
        )
    return bits


def seconds(duration: str) -> float:
    """Return the seconds that a duration such as "20ms" means.

    Examples:
        >>> seconds("1.5ms")
        0.0015
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", duration.lower())
    found = float(match[1]) * SECONDS[match[2]] if match is not None else -1.0
    if not 0 <= found <= MAX_LATENCY_SECONDS:
        raise ConfigError(f"a duration is like 20ms, 500us or 0.1s, up to 2s; got {duration[:40]!r}")
    return found


def share(percentage: str) -> float:
    """Return the share that a percentage such as "0.1%" means.

    Examples:
        >>> share("50%")
        0.5
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", percentage)
    found = float(match[1]) / 100 if match is not None else -1.0
    if not 0 <= found <= MAX_LOSS:
        raise ConfigError(f"a loss is a percentage such as 0.1%, up to 50%; got {percentage[:40]!r}")
    return found


@dataclass(frozen=True)
class Layout:
    """Machines behind links.

    Attributes:
        machines: How many.
        rate: At which each machine sends; None for as fast as here.
        processes_per_machine: That share a link.
        latency: The round trip between two machines.
        jitter: How much longer or shorter a round trip may be.
        loss: The share of packets that do not arrive, each way.
        slow_machines: By machine, a rate that differs from the others'.

    Examples:
        >>> Layout(machines=2, processes_per_machine=2).environment(3)["LOCAL_RANK"]
        '1'
    """

    machines: int
    rate: str | None = None
    processes_per_machine: int = 1
    latency: str = "0ms"
    jitter: str = "0ms"
    loss: str = "0%"
    slow_machines: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole_number("machines", self.machines, minimum=1)
        whole_number("processes_per_machine", self.processes_per_machine, minimum=1)
        if self.machines > MAX_MACHINES:
            raise ConfigError(f"machines must be at most {MAX_MACHINES}, got {self.machines}")
        for rate in (self.rate, *self.slow_machines.values()):
            if rate is not None:
                bits_per_second(rate)
        unknown = [machine for machine in self.slow_machines if not 0 <= machine < self.machines]
        if unknown:
            raise ConfigError(f"there is no machine {unknown[0]}: they are 0 to {self.machines - 1}")
        if seconds(self.jitter) > seconds(self.latency):
            raise ConfigError(f"jitter must be at most the latency {self.latency}, got {self.jitter}")
        share(self.loss)

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.machines * self.processes_per_machine

    def address(self, machine: int) -> str:
        """Return a machine's address in the network."""
        return f"10.77.0.{machine + 1}"

    @property
    def delays(self) -> Delays:
        """What happens to a packet between two machines. A round trip is two ways."""
        return Delays(seconds(self.latency) / 2, seconds(self.jitter) / 2, share(self.loss))

    def rate_of(self, machine: int) -> str | None:
        """Return the rate of a machine's link."""
        return self.slow_machines.get(machine, self.rate)

    def shaping(self, machine: int) -> list[str]:
        """Return the token bucket of a slow link, for `tc qdisc add dev … root`; nothing without a rate."""
        rate = self.rate_of(machine)
        if rate is None:
            return []
        bits = bits_per_second(rate)
        burst_bytes = max(MIN_BURST_BYTES, int(bits / 8 * BURST_SECONDS))
        limit = ["burst", str(burst_bytes), "latency", f"{1e3 * QUEUE_SECONDS:g}ms"]
        return ["tbf", "rate", f"{int(bits)}bit", *limit]

    def environment(self, rank: int, *, port: int = 29500, interface: str = "eth0") -> Mapping[str, str]:
        """Return what torchrun would set for a process, and which interface to use."""
        machine, place = divmod(rank, self.processes_per_machine)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self.processes_per_machine),
            "GROUP_RANK": str(machine),
            "GROUP_WORLD_SIZE": str(self.machines),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            # Otherwise Gloo would look for the address of this computer's name, which no namespace has.
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
        }
