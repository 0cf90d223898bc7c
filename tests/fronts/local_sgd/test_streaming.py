"""Fragments and delays: Streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from members import Member, run
from thinwire.algorithms import PowerSGD
from thinwire.fronts.local_sgd.fragment import averaged_tensors
from thinwire.fronts.local_sgd.layers import fragments_of, layer_of
from training import batch_of, flat, new_model, train_step

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
POWER = PowerSGD(matrix_rank=2, min_compression_ratio=1)


# Dividing the model


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


class Blocks(nn.Module):
    """As language models are: an embedding, equal blocks, a head; and a scale of its own."""

    def __init__(self, num_blocks: int, width: int = 4, tokens: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(num_blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, tokens)
        self.scale = nn.Parameter(torch.ones(3))


def dealt(model: nn.Module, num_fragments: int) -> list[list[str]]:
    """The layers of each fragment, in the order of the model."""
    fragments = fragments_of(averaged_tensors(model, ignored=(), buffers=True), num_fragments)
    return [list(dict.fromkeys(layer_of(each.name) for each in fragment)) for fragment in fragments]


def test_fragments_take_turns_with_equal_blocks() -> None:
    first, second, third = dealt(nn.ModuleList(block(4) for _ in range(9)), 3)
    assert (first, second, third) == (["0", "3", "6"], ["1", "4", "7"], ["2", "5", "8"])


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 4])
def test_a_model_is_divided_by_layers_of_all_depths_and_equal_bytes(num_fragments: int) -> None:
    model = Blocks(12)
    fragments = fragments_of(averaged_tensors(model, ignored=(), buffers=True), num_fragments)
    names = [each.name for fragment in fragments for each in fragment]
    assert len(names) == len(set(names)) == 12 * 6 + 8
    assert [fragment for fragment in fragments if any(each.name == "norm.running_mean" for each in fragment)]
    sizes = [sum(each.value.nbytes for each in fragment) for fragment in fragments]
    assert max(sizes) < 1.2 * sum(sizes) / num_fragments
    for layers in dealt(model, num_fragments):
        depths = [int(layer.removeprefix("blocks.")) for layer in layers if layer.startswith("blocks")]
        assert min(depths) < 6 <= max(depths)


def test_a_large_layer_has_a_fragment_nearly_to_itself() -> None:
    model = Blocks(6, tokens=120)
    assert sorted(map(len, dealt(model, 3)))[:2] == [1, 1]


# Against plain references, in float64


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("fragments", "delay_steps", "mix"), [(1, 0, 0.0), (2, 1, 0.5), (3, 4, 0.25)])
def test_against_a_plain_reference(size: int, fragments: int, delay_steps: int, mix: float) -> None:
    """Six outer steps of every fragment, AdamW inside and Nesterov's momentum outside."""
    expected = _by_itself(size, 36, 6, fragments, delay_steps, mix)
    assert (expected[0] - flat(new_model(dtype=torch.float64))).norm() > 0.3
    for rank, parameters in enumerate(run(size, _streaming, fragments, delay_steps, mix)):
        assert (parameters - expected[rank]).norm() < 1e-11


def _streaming(member: Member, fragments: int, delay_steps: int, mix: float) -> Tensor:
    member.take(new_model(dtype=torch.float64))
    member.optimizer = torch.optim.AdamW(member.model.parameters(), lr=1e-2)
    delayed = {"delay_steps": delay_steps, "mix": mix} if delay_steps else {}
    with member.local(every_steps=6, outer=NESTEROV, fragments=fragments, **delayed) as local:
        member.train(36)
        parameters = flat(member.model)
        assert local.sync.steps == 6 * fragments - len(local._flights)
    return parameters


def _by_itself(
    num_workers: int, num_steps: int, every_steps: int, num_fragments: int, delay: int, mix: float
) -> list[Tensor]:
    """Algorithm 2 of the Streaming DiLoCo paper, on vectors; each fragment some elements of them."""
    workers = [new_model(dtype=torch.float64) for _ in range(num_workers)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=1e-2) for worker in workers]
    theta = flat(workers[0])
    velocity = torch.zeros(theta.shape, dtype=torch.float64)
    averaged = averaged_tensors(workers[0], ignored=(), buffers=True)
    places = {each.name: part for each, part in zip(averaged, _places(workers[0]), strict=True)}
    fragments = [
        torch.cat([places[each.name] for each in fragment])
        for fragment in fragments_of(averaged, num_fragments)
    ]
    in_flight: dict[int, tuple[int, Tensor]] = {}
    for step in range(1, num_steps + 1):
        for place, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            train_step(worker, optimizer, batch_of(step - 1, place).double())
        for number, of_it in enumerate(fragments):
            if step % every_steps == -(-(number + 1) * every_steps // num_fragments) % every_steps:
                now = torch.stack([flat(worker)[of_it] for worker in workers])
                in_flight[number] = step + delay, theta[of_it] - now.mean(0)
            if number in in_flight and in_flight[number][0] == step:
                gradient = in_flight.pop(number)[1]
                velocity[of_it] = 0.9 * velocity[of_it] + gradient
                theta[of_it] -= 0.7 * (gradient + 0.9 * velocity[of_it])
                for worker in workers:
                    held = flat(worker)
                    held[of_it] = mix * held[of_it] + (1 - mix) * theta[of_it]
                    nn.utils.vector_to_parameters(held, worker.parameters())
    return [flat(worker) for worker in workers]


def _places(model: nn.Module) -> Sequence[Tensor]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return torch.arange(sum(sizes)).split_with_sizes(sizes)
