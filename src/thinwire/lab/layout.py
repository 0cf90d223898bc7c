"""What the network looks like: how many hosts, grouped how, and how fast the slow links are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.checks import whole_number
from thinwire.errors import ConfigError

# Addresses end in 1 to 254.
MAX_HOSTS = 200
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
MIN_BITS_PER_SECOND, MAX_BITS_PER_SECOND = 10**5, 10**11
# What may pass at once after a pause: as little as can be, or short messages would not meet the rate at all.
# But a packet that is handed to the link may have 64 KiB, and a busy kernel may be a millisecond late.
MIN_BURST_BYTES = 68 * 2**10
BURST_SECONDS = 1e-3


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


@dataclass(frozen=True)
class Layout:
    """Hosts behind links.

    Examples:
        >>> Layout(hosts=4, hosts_per_node=2).environment(3)["LOCAL_RANK"]
        '1'
    """

    hosts: int
    rate: str | None = None
    hosts_per_node: int = 1

    def __post_init__(self) -> None:
        whole_number("hosts", self.hosts, minimum=1)
        whole_number("hosts_per_node", self.hosts_per_node, minimum=1)
        if self.hosts > MAX_HOSTS:
            raise ConfigError(f"hosts must be at most {MAX_HOSTS}, got {self.hosts}")
        if self.hosts % self.hosts_per_node:
            raise ConfigError(
                f"hosts must be a multiple of hosts_per_node, got {self.hosts} and {self.hosts_per_node}"
            )
        if self.rate is not None:
            bits_per_second(self.rate)

    @property
    def nodes(self) -> int:
        """Groups of hosts."""
        return self.hosts // self.hosts_per_node

    def address(self, host: int) -> str:
        """Return a host's address in the network."""
        return f"10.77.0.{host + 1}"

    def shaping(self) -> list[str]:
        """Return the token bucket of a slow link, for `tc qdisc add dev … root`; nothing without a rate."""
        if self.rate is None:
            return []
        bits = bits_per_second(self.rate)
        burst_bytes = max(MIN_BURST_BYTES, int(bits / 8 * BURST_SECONDS))
        limit = ["burst", str(burst_bytes), "latency", "100ms"]
        return ["tbf", "rate", f"{int(bits)}bit", *limit]

    def environment(self, host: int, *, port: int = 29500, interface: str = "eth0") -> Mapping[str, str]:
        """Return what torchrun would set for the process of a host, and which interface to use."""
        node, place = divmod(host, self.hosts_per_node)
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(self.hosts),
            # As if the hosts of a node were the processes of a machine: what torchrun would say of them.
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self.hosts_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            # Otherwise Gloo would look for the address of this machine's name, which no namespace has.
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
        }
