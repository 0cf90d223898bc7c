"""Machines of several processes under DDP: how they are found, what is refused, and what leaves a machine."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire
from processes import in_each_process
from thinwire import AllReduce, Cast, PowerSGD, Quantize, hooks
from thinwire.algorithms import Algorithm
from thinwire.comm import Machines, ProcessGroupTransport, Recording
from thinwire.comm.machines import machines_of, ranks_by_machine
from thinwire.errors import AgreementError, ConfigError, ThinwireError
from thinwire.sync.handle import engine_of
from training import agreed, are_alike, ddp_of, flat, gradient_of, new_model

PAIRS = [[0, 1], [2, 3]]


@in_each_process(4)
def test_states_of_torchs_hooks_take_it_as_a_setting() -> None:
    bf16 = hooks.MachinesState(machines=PAIRS)
    low_rank = hooks.PowerSGDState(None, start_powerSGD_iter=0, machines=PAIRS)
    cases: list[tuple[hooks.Hook, Any, Algorithm]] = [
        (hooks.bf16_compress_hook, bf16, Cast("bf16")),
        (hooks.powerSGD_hook, low_rank, PowerSGD(matrix_rank=1)),
    ]
    for hook, state, algorithm in cases:
        model, other = ddp_of(), ddp_of()
        model.register_comm_hook(state, hook)
        sync = thinwire.attach(other, algorithm, machines=PAIRS)
        for step in range(3):
            mine = gradient_of(model, step)
            assert are_alike([mine])
            assert torch.equal(mine, gradient_of(other, step))
        assert "over 2 machines of 2 processes" in str(state.sync)
        assert 0 < state.sync.stats().message_bytes == sync.stats().message_bytes
    with pytest.raises(ConfigError, match="make one state for each model and hook"):
        bf16.run(Cast("fp16"), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="once per machine"):
        hooks.quantization_pertensor_hook(bf16, None)  # type: ignore[arg-type]


@in_each_process(4)
def test_a_subgroup_sends_the_change_of_its_models_once() -> None:
    """Two machines of two processes, and two of one: whether models are equal, and bytes."""
    rank = dist.get_rank()
    subgroup = [dist.new_group(pair) for pair in PAIRS][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    found = []
    for groups in ({"subgroup": subgroup}, {"replicas": across}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        streaming = thinwire.Streaming(fragments=2, delay_steps=1)
        with thinwire.DiLoCo(model, optimizer, every_steps=3, streaming=streaming, **groups) as local:
            for step in range(7):
                gradient_of(model, step)
                optimizer.step()
        assert agreed(model) or "replicas" in groups
        found.append(local.stats())
    several, alone = found
    assert 0 < alone.message_bytes <= several.message_bytes <= 1.1 * alone.message_bytes
    assert several.inside_bytes > 0


@in_each_process(4)
def test_uneven_inputs_are_divided_by_those_that_have_some() -> None:
    found = []
    for machines in (False, PAIRS):
        model = ddp_of(new_model(dtype=torch.float64))
        thinwire.attach(model, AllReduce(), machines=machines)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with thinwire.join(model, divide_by_initial_world_size=False):
            for step in range(1 + dist.get_rank()):
                gradient_of(model, step)
                optimizer.step()
        found.append(flat(model))
    assert are_alike([found[1]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@in_each_process(4)
def test_processes_of_a_part_of_the_job_find_each_other_however_many_groups_each_is_in() -> None:
    # A new one, of which no machines are known yet.
    own, transport = dist.get_rank(), ProcessGroupTransport(dist.new_group())
    for _ in range(2 * (own == 0)):
        dist.new_group([own], use_local_synchronization=True)
    # As in a job of one process more.
    with patch.object(dist, "get_world_size", lambda *_: 5):
        machines = machines_of(transport, PAIRS)
    assert machines is not None
    of_rows = (machines.intra_node, PAIRS[own // 2]), (machines.inter_node, [own % 2, own % 2 + 2])
    for group, members in of_rows:
        ranks = torch.tensor([float(own)])
        group.mean(ranks, "who is in it").wait()
        assert ranks == sum(members) / 2


LAUNCHED = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}


@in_each_process(4)
def test_the_launcher_tells_who_shares_a_machine() -> None:
    device, timeout = torch.device("cpu"), timedelta(seconds=77)
    group = dist.new_group(list(range(4)), timeout)
    with patch.dict(os.environ, LAUNCHED, GROUP_RANK=str(dist.get_rank() // 2)):
        sync = thinwire.attach(ddp_of(process_group=group), Quantize(bits=4))
        groups = machines_of(ProcessGroupTransport(group, device))
    # A process that stalls is given as long as in the model's own group.
    assert isinstance(groups, Machines)
    for transport in (groups.intra_node, groups.inter_node):
        assert isinstance(transport, ProcessGroupTransport)
        assert transport.group._get_backend(device).options._timeout == timeout
    assert "over 2 machines of 2 processes" in str(sync)


def of_launcher(kind: str, machines: list[list[int]]) -> dict[str, str]:
    """What a launcher tells this process, of four."""
    rank = dist.get_rank()
    (machine,) = (number for number, row in enumerate(machines) if rank in row)
    local, number = str(len(machines[machine])), str(machines[machine].index(rank))
    by_slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": number, "SLURM_NODEID": str(machine)}
    sizes = ",".join(str(len(row)) for row in machines)
    return {
        "by hand": {"LOCAL_WORLD_SIZE": local, "LOCAL_RANK": number},
        "Open MPI": {
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": local,
            "OMPI_COMM_WORLD_LOCAL_RANK": number,
        },
        "MPICH": {"PMI_SIZE": "4", "MPI_LOCALNRANKS": local, "MPI_LOCALRANKID": number},
        "Cray": {
            "PMI_SIZE": "4",
            "PMI_LOCAL_SIZE": local,
            "PMI_LOCAL_RANK": number,
            "PALS_NODEID": str(machine),
        },
        "srun": {**by_slurm, "SLURM_STEP_TASKS_PER_NODE": sizes},
        "srun, and the size by hand": {
            **by_slurm,
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "LOCAL_WORLD_SIZE": local,
        },
    }[kind]


KINDS = ("by hand", "Open MPI", "MPICH", "Cray", "srun", "srun, and the size by hand")
NUMBERED = KINDS[3:]  # which number machines


@pytest.mark.parametrize("kind", KINDS)
@in_each_process(4)
def test_other_launchers_tell_it_too_on_machines_of_one_host_name(kind: str) -> None:
    in_turn = [[0, 2], [1, 3]]

    def found(machines: list[list[int]], host: str, find: Any = machines_of) -> Any:
        told = patch.dict(os.environ, of_launcher(kind, machines))
        with told, patch("socket.gethostname", lambda: host):
            return find(ProcessGroupTransport())

    # Those in turn of different names, as far as the machines are not numbered.
    own_name = "clone" if kind in NUMBERED else f"host {dist.get_rank() % 2}"
    for machines, host in ((PAIRS, "clone"), (in_turn, own_name)):
        groups = found(machines, host)
        assert groups.rows == tuple(map(tuple, machines))
        assert (groups.intra_node.size, groups.inter_node.size) == (2, 2)
    if kind not in NUMBERED:
        # Machine after machine, of other sizes: they can be told apart; in turn they can not.
        assert found([[0], [1, 2, 3]], "clone", ranks_by_machine) == [[0], [1, 2, 3]]
        with pytest.raises(AgreementError, match=r"have one host name.*GROUP_RANK"):
            found(in_turn, "clone")


@in_each_process(4)
def test_nothing_is_sent_where_there_is_nothing_to_find() -> None:
    """No launcher, one machine, one process on each, an older launcher, or one that has started others."""
    of_two = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    of_two |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "0"}
    variables: tuple[dict[str, str], ...] = (
        {},
        of_two,
        {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"},
        {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "4"},
        {"LOCAL_WORLD_SIZE": "4"},
    )
    recording = Recording(ProcessGroupTransport())
    for told in variables:
        with (
            patch.dict(os.environ, told, GROUP_RANK="0"),
            patch.object(ProcessGroupTransport, "all_gather", recording.all_gather),
        ):
            assert machines_of(ProcessGroupTransport()) is None
            assert machines_of(ProcessGroupTransport(), False) is None
    assert not recording.notes


@in_each_process(4)
def test_unequal_machines_are_said_and_each_process_sends_by_itself() -> None:
    with patch("thinwire.comm.machines.logger.warning") as warning:
        sync = thinwire.attach(ddp_of(), Quantize(bits=4), machines=[[0, 1, 2], [3]])
    told = (
        "machines have 3, 1 processes of the group, so each process sends by itself; with "
        "equal numbers, a machine would send its sum only once"
    )
    assert [call.args[1] for call in warning.call_args_list] == ([] if dist.get_rank() else [told])
    assert "over 4 processes" in str(sync)


@in_each_process(4)
def test_what_can_not_be_is_refused_in_a_sentence() -> None:
    unlike = PAIRS if dist.get_rank() else [[0, 2], [1, 3]]
    cases: list[tuple[Any, type[ThinwireError], str]] = [
        ([[0, 1], [2]], ConfigError, r"leaves out \[3\]"),
        ([[0, 1], [1, 2, 3]], ConfigError, "has some twice"),
        ([[0, 1], [2, 3, 4]], ConfigError, r"has \[4\], which are not in it"),
        (2, ConfigError, "machines must be True, False"),
        (init_device_mesh("cpu", (4,)), ConfigError, "a mesh of two dimensions"),
        (unlike, AgreementError, r"process 0 has machines \[\[0, 2\], \[1, 3\]\], processes 1, 2, 3 have"),
    ]
    model = ddp_of()
    for machines, kind, words in cases:
        with pytest.raises(kind, match=words):
            thinwire.attach(model, Quantize(bits=4), machines=machines)


@pytest.mark.parametrize("case", ["hosts differ", "too many", "some differ", "one is late"])
@in_each_process(4)
def test_variables_that_lie_are_refused_on_all(case: str) -> None:
    rank = dist.get_rank()
    variables = {**LAUNCHED, "GROUP_RANK": str(rank // 2)}
    words, host = "LOCAL_WORLD_SIZE is", "host"
    if case == "hosts differ":
        host, words = f"host {rank}", "their host names differ"
    if case == "too many":
        variables["GROUP_RANK"] = "0"
    if case == "some differ" and rank == 1:
        variables["LOCAL_WORLD_SIZE"] = "3"
    model = ddp_of()
    with patch.dict(os.environ, variables), patch("socket.gethostname", lambda: host):
        if case == "one is late":
            # The others attach, while one trains a model that it has attached by itself.
            engine = engine_of(thinwire.attach(ddp_of(), Quantize(bits=4), machines=False))
            attach = partial(thinwire.attach, model, Quantize(bits=4))
            with pytest.raises(AgreementError, match="calls differ"):
                engine.buckets.agree(torch.device("cpu")) if rank == 3 else attach()
            return
        with pytest.raises(AgreementError, match=words):
            thinwire.attach(model, Quantize(bits=4))


@pytest.mark.parametrize(("machines", "is_mesh"), [(PAIRS, False), ([[0, 3], [2, 1]], True)], ids=str)
@in_each_process(4)
def test_a_mesh_tells_it_too_in_any_order_and_unused_parameters_stay_equal(
    machines: list[list[int]], is_mesh: bool
) -> None:
    model = ddp_of(find_unused_parameters=True)
    layout = DeviceMesh("cpu", machines) if is_mesh else machines
    sync = thinwire.attach(model, PowerSGD(matrix_rank=2), machines=layout)
    assert are_alike(gradient_of(model, step) for step in range(3))
    state = sync.state_dict()
    assert {name for name, _ in state["error"]} >= {"0.weight", "2.weight"}
    assert "2 machines of 2 processes" in str(sync)


def handles() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@in_each_process(4)
def test_who_attaches_again_and_again_opens_nothing_more() -> None:
    model, layer, held = ddp_of(), nn.Linear(3, 2), []
    pair = dist.new_subgroups(2)[0]  # type: ignore[no-untyped-call]
    for step in range(5):
        sync = thinwire.attach(model, Quantize(bits=4), machines=PAIRS)
        assert are_alike([gradient_of(model, step)])
        assert sync.stats().compression_ratio > 2
        assert sync.state_dict()
        sync.detach()
        optimizer = torch.optim.SGD(layer.parameters())
        with thinwire.LocalSGD(layer, optimizer, every_steps=1, subgroup=pair) as local:
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert local.stats().steps == 1
        held.append(handles())
    assert held[-1] == held[1]
