"""The slow network on one machine: real namespaces, real links, real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

import thinwire
from launcher import Running, run_python, started_python
from stand_ins import stand_ins
from thinwire import CommunicationError, ConfigError
from thinwire.lab.layout import Layout, bits_per_second
from thinwire.lab.network import Network, check_machine

Measured = TypeVar("Measured")

WITHIN_SECONDS = 60.0
SOURCE = Path(thinwire.__file__).parents[1]

MEASURE = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sender, total = int(sys.argv[1]), int(float(sys.argv[2]) * 1e6)
address = os.environ["MASTER_ADDR"], 29500
if rank == 0:
    server = socket.create_server(address)
    peer, _ = server.accept()
    got, start = 0, time.monotonic()
    while got < total:
        got += len(peer.recv(1 << 20))
    print(f"took {time.monotonic() - start:.4f} s", flush=True)
elif rank == sender:
    for _ in range(200):
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(bytes(total))
    peer.close()
"""

# Five steps exact, five of low rank; and what the kernel has counted as sent on eth0 at both ends.
TRAIN = """
import torch, torch.distributed as dist
from thinwire.powersgd import Config, PowerSGD, optimizer_step
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
powersgd = PowerSGD(model.parameters(), Config(rank=4, start_compressing_after_num_steps=5))
for _ in range(2):
    for _ in range(5):
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer_step(optimizer, powersgd)
    dist.barrier()  # now the other has received what this one has sent
    eth0, = (line.split() for line in open("/proc/self/net/dev") if line.strip().startswith("eth0"))
    told = f"message bytes {powersgd.stats().message_bytes}, sent bytes {eth0[9]}"
    print(f"world size {dist.get_world_size()}, {told}", flush=True)
dist.destroy_process_group()
"""


def can_unshare() -> bool:
    flags = [["--net"], ["--user", "--map-root-user", "--net"]]
    return shutil.which("unshare") is not None and any(
        subprocess.run(["unshare", *each, "true"], capture_output=True, check=False).returncode == 0
        for each in flags
    )


real = pytest.mark.skipif(not can_unshare(), reason="NO NETWORK NAMESPACES HERE: the lab was not tested")


def undisturbed(measure: Callable[[], Measured], is_right: Callable[[Measured], bool]) -> Measured:
    """A measurement that is right, or the fifth: what else this computer does now and then can spoil one."""
    for _ in range(4):
        measured = measure()
        if is_right(measured):
            return measured
    return measure()


def lab_command(*options: str, code: str, arguments: tuple[str, ...] = ()) -> list[str]:
    """A Python without its site on every host, which is there at once."""
    return ["thinwire", "lab", *options, "--", sys.executable, "-S", "-c", code, *arguments]


def run_lab(
    *options: str,
    code: str,
    arguments: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return run_python(*lab_command(*options, code=code, arguments=arguments), environment=environment)


@contextmanager
def started_lab(*options: str, code: str) -> Iterator[tuple[Running, str]]:
    """A lab whose hosts have all said something; and how its processes can be told from others."""
    mark = f"MARK={os.getpid()}-{time.monotonic_ns()}"
    command = lab_command(*options, code=code)
    with started_python(*command, environment=dict([mark.split("=")])) as lab:
        said = {lab.stdout.readline() for _ in range(2)}
        assert {line.split("]")[0] for line in said} == {"[machine 0", "[machine 1"}
        yield lab, mark


def alive(mark: str) -> list[int]:
    """Processes with a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_zombie = entry.name.isdigit() and ") Z " in (entry / "stat").read_text()
            if entry.name.isdigit() and not is_zombie and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + WITHIN_SECONDS
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive(mark) == []


def wait_for_commands(mark: str, wanted: dict[bytes, int]) -> None:
    """Until so many processes with a mark were started as what begins so.

    For a moment of its start, none shows its mark.
    """
    deadline = time.monotonic() + WITHIN_SECONDS
    while True:
        commands = [Path(f"/proc/{each}/cmdline").read_bytes() for each in alive(mark)]
        found = {start: sum(each.startswith(start) for each in commands) for start in wanted}
        if found == wanted or time.monotonic() > deadline:
            assert found == wanted
            return
        time.sleep(0.02)


HOLDER, PYTHON = b"sleep\0infinity\0", sys.executable.encode() + b"\0"
OF_TWO_MACHINES = {HOLDER: 3, PYTHON: 4}  # one namespace more than machines; keepers and commands
SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@real
@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "sender", "megabytes", "mbit"),
    [
        (["--machines=2", "--rate=100mbit"], 1, 10, 100),
        (["--machines=2", "--rate=100mbit", "--processes-per-machine=2"], 2, 10, 100),
    ],
    ids=["100 Mbit/s", "of two processes each"],
)
def test_a_known_transfer_takes_the_time_it_must(
    options: list[str], sender: int, megabytes: int, mbit: int
) -> None:
    expected = pytest.approx(megabytes * 8 / mbit, rel=0.15)

    def took() -> float:
        done = run_lab(*options, code=MEASURE, arguments=(str(sender), str(megabytes)))
        assert done.returncode == 0, done.stderr
        return float(re.search(r"\[machine 0.*\] took ([\d.]+) s", done.stdout)[1])  # type: ignore[index]

    assert undisturbed(took, lambda seconds: seconds == expected) == expected


@real
@pytest.mark.parametrize(
    "options", [["--machines=2"], ["--machines=2", "--processes-per-machine=2", "--rate=1mbit"]]
)
def test_links_without_a_rate_and_within_a_machine_are_fast(options: list[str]) -> None:
    done = run_lab(*options, code=MEASURE, arguments=("1", "15"))
    assert done.returncode == 0, done.stderr
    took = float(re.search(r"took ([\d.]+) s", done.stdout)[1])  # type: ignore[index]
    assert took < 60  # on a busy machine too; over a link of 1 Mbit/s it would be 120


WAYS = """
import os, socket, sys, time
rank, count = int(os.environ["RANK"]), 400
if rank == 0:
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("", 29500))
    receiver.settimeout(3)
    got = []
    try:
        while len(got) < count:
            data, sender = receiver.recvfrom(64)
            got.append(int(data))
            receiver.sendto(data, sender)
    except TimeoutError:
        pass
    print(f"got {len(got)}, in order {got == sorted(got)}", flush=True)
else:
    time.sleep(0.3)
    peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    peer.connect((os.environ["MASTER_ADDR"], 29500))
    peer.settimeout(0.5)
    took = []
    for number in range(count):
        start = time.monotonic()
        peer.send(str(number).encode())
        if number % 40 == 0:
            try:
                while int(peer.recv(64)) != number:
                    pass
                took.append(time.monotonic() - start)
            except (TimeoutError, ConnectionError):
                pass
    print(f"fastest round trip {min(took)}, sent {count}", flush=True)
"""


@real
@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "seconds", "most"),
    [
        (["--latency=60ms"], 0.06, 400),
        (["--latency=60ms", "--jitter=10ms"], 0.05, 400),
        (["--latency=60ms", "--loss=30%"], 0.06, 360),
    ],
    ids=["latency", "jitter", "loss"],
)
def test_packets_are_late_and_lost_and_keep_their_order(
    options: list[str], seconds: float, most: int
) -> None:
    """Late by what was asked for at least, on a busy machine too; the lab itself refuses what is too late."""
    done = undisturbed(
        lambda: run_lab("--machines=2", *options, code=WAYS), lambda done: done.returncode == 0
    )
    assert done.returncode == 0, done.stderr
    got = int(re.search(r"got (\d+), in order True", done.stdout)[1])  # type: ignore[index]
    fastest = float(re.search(r"fastest round trip ([\d.]+)", done.stdout)[1])  # type: ignore[index]
    assert fastest >= seconds
    assert 160 <= got <= most
    measured = re.search(r"a round trip takes ([\d.]+) ms, and a machine sends [\d.]+ Mbit/s", done.stderr)
    assert measured is not None
    # What the lab sent to measure its link is not the command's.
    sent = [float(each) for each in re.findall(r"machine \d sent ([\d.]+) MB", done.stderr)]
    assert max(sent) < 1


@real
@pytest.mark.alone
def test_a_link_that_misses_what_was_asked_for_is_refused() -> None:
    with Network(Layout(machines=2, latency="60ms", rate="10mbit")) as network:
        network.check_link()
        object.__setattr__(network.layout, "latency", "90ms")
        with pytest.raises(CommunicationError, match="but 90ms and 10mbit were asked for: this computer is"):
            network.check_link()


@real
def test_one_machine_may_be_slower() -> None:
    """Machine 1 sends 0.5 MB at 2 Mbit/s where the others' links have no rate."""
    done = run_lab("--machines=2", "--slow-machine=1:2mbit", code=MEASURE, arguments=("1", "0.5"))
    assert done.returncode == 0, done.stderr
    took = float(re.search(r"took ([\d.]+) s", done.stdout)[1])  # type: ignore[index]
    assert took > 0.8 * 0.5 * 8 / 2


@real
def test_training_over_gloo_and_the_bytes_it_sends(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    options = ["--machines=2", "--rate=1gbit", f"--report={report}"]
    with stand_ins() as stand_in:
        done = run_python("thinwire", "lab", *options, "--", sys.executable, "-S", *stand_in, str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    of_each = [
        re.findall(rf"\[machine {host}\] world size 2, message bytes (\d+), sent bytes (\d+)", done.stdout)
        for host in range(2)
    ]
    found = json.loads(report.read_text())
    assert found["exit_code"] == 0
    assert len(found["seconds"]) == 2
    for told, sent_bytes in zip(of_each, found["sent_bytes"], strict=True):
        (exact_message_bytes, exact_bytes), (message_bytes, all_bytes) = (map(int, each) for each in told)
        # Of two hosts, each sends all of a message once.
        assert exact_message_bytes == pytest.approx(5 * 4 * 1024 * 1024, rel=1e-6)
        assert exact_bytes == pytest.approx(exact_message_bytes, rel=0.15)
        assert message_bytes - exact_message_bytes < exact_message_bytes / 50
        assert all_bytes - exact_bytes < exact_bytes / 50
        assert sent_bytes == pytest.approx(all_bytes, rel=0.01)


TWO_LEVELS = """
import torch, torch.distributed as dist, thinwire
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1024, 2048, bias=False))
sync = thinwire.attach(model, thinwire.Quantize(bits=4))
card, counted = [], []
for _ in range(3):
    for _ in range(4):
        model(torch.randn(2, 1024)).square().mean().backward()
    dist.barrier()
    eth0, = (line.split() for line in open("/proc/self/net/dev") if line.strip().startswith("eth0"))
    card.append(int(eth0[9]))
    counted.append(sync.stats().message_bytes)
print(f"sent {card[2] - card[1]}, counted {counted[2] - counted[1]}, {sync}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@real
def test_a_machine_of_two_processes_sends_what_is_counted_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO_LEVELS)
    options = ["--machines=2", "--processes-per-machine=2", "--rate=1gbit"]
    with stand_ins() as stand_in:
        done = run_python("thinwire", "lab", *options, "--", sys.executable, "-S", *stand_in, str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"process \d\] sent (\d+), counted (\d+), .* over 2 machines of 2", done.stdout)
    assert len(found) == 4
    for sent, counted in ((int(sent), int(counted)) for sent, counted in found):
        assert counted == pytest.approx(4 * 1024 * 2048 * (4 + 16 / 64) / 8, rel=0.01)
        assert sent == pytest.approx(counted, rel=0.1)


@real
def test_the_first_failure_is_the_labs_and_ends_the_others() -> None:
    code = "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '1' else 60); sys.exit(7)"
    start = time.monotonic()
    done = run_lab("--machines=3", "--grace-seconds=0.2", code=code)
    assert done.returncode == 7
    assert time.monotonic() - start < 60


@real
def test_a_host_that_is_killed_is_told_as_a_shell_does() -> None:
    code = "import os; os.kill(os.getpid(), 9 if os.environ['RANK'] == '0' else 0)"
    assert run_lab("--machines=2", code=code).returncode == 137


@real
@pytest.mark.parametrize(
    ("number", "is_deaf"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["Ctrl-C", "SIGTERM", "nobody listens"],
)
def test_a_signal_is_passed_on_and_nothing_is_left(
    number: signal.Signals, is_deaf: bool, tmp_path: Path
) -> None:
    """Ctrl-C on a terminal is a signal to all that the lab has not put elsewhere; what was sent is told."""
    report = tmp_path / "report.json"
    deaf = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
    options = ("--machines=2", f"--grace-seconds={0.3 if is_deaf else 5}", f"--report={report}")
    with started_lab(*options, code=deaf * is_deaf + SLEEP) as (lab, mark):
        wait_for_commands(mark, OF_TWO_MACHINES)
        (os.killpg if number == signal.SIGINT else os.kill)(lab.pid, number)
        assert lab.wait() == 128 + number
        wait_until_gone(mark)
    assert json.loads(report.read_text())["exit_code"] == 128 + number


@real
@pytest.mark.parametrize("options", [[], ["--latency=500ms"]], ids=["bridge", "relay"])
def test_killed_outright_it_leaves_nothing(options: list[str]) -> None:
    """Not even what the hosts' processes have started, in sessions of their own."""
    code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); " + SLEEP
    with started_lab("--machines=2", *options, code=code) as (lab, mark):
        commands = {HOLDER: 3, PYTHON: 4 + len(options)}  # the relay is one
        wait_for_commands(mark, {**commands, b"sleep\x0060\0": 2})
        lab.kill()
        lab.wait()
        wait_until_gone(mark)


@real
def test_what_a_command_has_started_ends_with_it() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '61'], start_new_session=True); print('up')"
    mark = f"MARK={os.getpid()}-{time.monotonic_ns()}"
    done = run_lab("--machines=2", code=code, environment=dict([mark.split("=")]))
    assert done.returncode == 0
    assert done.stdout.count("up") == 2
    assert alive(mark) == []


@real
def test_it_ends_only_what_it_has_started() -> None:
    """Not what has the same environment, nor another lab."""
    with started_lab("--machines=2", code=SLEEP) as (lab, mark):
        wait_for_commands(mark, OF_TWO_MACHINES)
        count = len(alive(mark))
        environment = dict([mark.split("=")])
        with subprocess.Popen(["sleep", "600"], env=os.environ | environment) as other:
            try:
                done = run_lab("--machines=1", code="print('up')", environment=environment)
                assert (done.returncode, done.stdout) == (0, "[machine 0] up\n"), done.stderr
                assert len(alive(mark)) == count + 1
                lab.kill()
                lab.wait()
                deadline = time.monotonic() + WITHIN_SECONDS
                while alive(mark) != [other.pid] and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert alive(mark) == [other.pid]
                assert other.poll() is None
            finally:
                other.kill()


@real
def test_nobody_reads_the_output() -> None:
    """As for any other command, that is an end by SIGPIPE, and nothing to talk about."""
    with started_python(*lab_command("--machines=2", code="for i in range(200_000): print(i)")) as lab:
        assert lab.stdout.read(1) == "["
        lab.stdout.close()
        assert lab.stderr.read() == ""
        assert lab.wait() == 128 + signal.SIGPIPE


@real
def test_output_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = lab_command("--machines=2", f"--report={report}", code="print('up')")
    with started_python(*command, stdout="/dev/full") as lab:
        assert (
            lab.stderr.read() == "thinwire: the processes' output can't be written: No space left on device\n"
        )
        assert lab.wait() == 1
    assert json.loads(report.read_text())["exit_code"] == 1


@real
def test_a_command_that_is_none() -> None:
    done = run_python("thinwire", "lab", "--machines=1", "--", "no-such-command")
    assert done.returncode == 127
    assert done.stdout == "[machine 0] no-such-command can't be started: No such file or directory\n"


@real
@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root tests this all the time")
def test_as_somebody_who_is_not_root() -> None:
    """In a user namespace. Root's folders are closed to others, so what is needed is mounted elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        needed = {"base": sys.base_prefix, "site": sysconfig.get_path("purelib"), "source": str(SOURCE)}
        for name in needed:
            Path(folder, name).mkdir()
        mounts = [f"mount --bind '{path}' '{folder}/{name}'" for name, path in needed.items()]
        nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
        python = f"{folder}/base/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        measure = f'{python} -S -c "$MEASURE" 1 5'
        lab = f"{python} -m thinwire lab --machines=2 --rate=100mbit -- {measure}"
        found = f"env PYTHONHOME={folder}/base PYTHONPATH={folder}/source:{folder}/site"
        script = " && ".join([*mounts, f"cd {folder}", f"exec {nobody} {found} {lab}"])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"MEASURE": MEASURE},
        )
    assert done.returncode == 0, done.stderr
    took = float(re.search(r"took ([\d.]+) s", done.stdout)[1])  # type: ignore[index]
    assert took > 0.85 * 5 * 8 / 100


def test_a_machine_that_can_not_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "darwin")
        with pytest.raises(ConfigError, match="needs Linux's network namespaces; this is darwin"):
            check_machine()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(ConfigError, match="the lab needs iproute2; install it"):
        check_machine()


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("100mbit", 1e8), ("100gbit", 1e11), ("2.5Gbit", 2.5e9), ("500kbit", 5e5), ("200000bit", 2e5)],
)
def test_rates(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


NO_RATES = ["", "fast", "100", "100mb", "-1mbit", "1kbit", "0gbit", "1 gbit", "101gbit", f"{10**400}gbit"]


@pytest.mark.parametrize("rate", NO_RATES, ids=lambda rate: rate[:9])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="a rate is like 100mbit"):
        Layout(machines=2, rate=rate)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"machines": 0}, "machines must be a whole number of at least 1"),
        ({"machines": 201}, "at most 200"),
        ({"machines": 2, "processes_per_machine": 0}, "processes_per_machine must be a whole number"),
        ({"machines": 2, "latency": "20"}, "a duration is like 20ms"),
        ({"machines": 2, "latency": "3s"}, "up to 2s; got '3s'"),
        ({"machines": 2, "jitter": "2ms"}, "jitter must be at most the latency 0ms, got 2ms"),
        ({"machines": 2, "loss": "60%"}, "a percentage such as 0.1%, up to 50%"),
        ({"machines": 2, "slow_machines": {2: "1mbit"}}, "there is no machine 2: they are 0 to 1"),
        ({"machines": 2, "slow_machines": {1: "fast"}}, "a rate is like 100mbit"),
    ],
)
def test_layouts_that_are_none(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(**settings)  # type: ignore[arg-type]


def test_the_environment_is_torchruns() -> None:
    grouped = Layout(machines=2, processes_per_machine=3).environment(4)
    assert {name: grouped[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
    }
    assert (grouped["GROUP_RANK"], grouped["MASTER_ADDR"]) == ("1", "10.77.0.1")


@pytest.mark.parametrize(
    ("option", "message"),
    [("--rate=fast", "a rate is like 100mbit"), ("--slow-machine=1", "--slow-machine is like 2:10mbit")],
)
def test_a_mistake_on_the_command_line_is_one_line(option: str, message: str) -> None:
    done = run_lab("--machines=2", option, code="pass")
    assert done.returncode == 2
    assert done.stderr.startswith(f"thinwire: {message}")
    assert done.stderr.count("\n") == 1
