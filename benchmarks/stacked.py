"""Many equal byte GPTs, computed together: one pass of batched products instead of one pass each.

Their parameters lie in one tensor, their gradients in another, a row a model; the models are views of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from thinwire.demo.gpt import GPT, GPTConfig, next_byte_loss
from thinwire.plan import ParameterSpec


class StackedGPT:
    """Equal models, one for each member of each lane, whose gradients come from one backward pass.

    A lane is a training run; several side by side are faster than one after another. Each has a seed to start
    from, the same for its members. `models` are by member those of all lanes; their gradients are set and
    stay where they are. `buckets` are the parameters of each lane; `parameters` is what the models hold,
    `(members, lanes, elements)`, and `gradients` has the same shape.
    """

    def __init__(
        self, config: GPTConfig, seeds: Sequence[int], num_members: int, device: torch.device
    ) -> None:
        self.config = config
        flats = []
        for seed in seeds:
            torch.manual_seed(seed)
            first = GPT(config)
            flats.append(torch.cat([each.detach().flatten() for each in first.parameters()]))
        specs = {name: ParameterSpec.of(name, each) for name, each in first.named_parameters()}
        self.buckets = [
            tuple(spec._replace(name=f"{lane}.{name}") for name, spec in specs.items())
            for lane in range(len(seeds))
        ]
        self.parameters = torch.stack(flats).to(device).repeat(num_members, 1, 1)
        self.gradients = torch.zeros_like(self.parameters)
        self._num_models = num_members * len(seeds)
        self._stacks = dict(zip(specs, self._parts(self.parameters), strict=True))
        self.models = [
            nn.ModuleList(self._model(member * len(seeds) + lane) for lane in range(len(seeds)))
            for member in range(num_members)
        ]
        for stack in self._stacks.values():
            stack.requires_grad_()
        # Each model looks into its own table of a byte's vector.
        places = torch.arange(self._num_models, device=device)
        self._table_offsets = config.vocabulary * places.view(-1, 1, 1)

    def _parts(self, flats: Tensor) -> list[Tensor]:
        specs = self.buckets[0]
        parts = flats.flatten(0, 1).split_with_sizes([spec.numel for spec in specs], dim=1)
        return [part.view(-1, *spec.shape) for spec, part in zip(specs, parts, strict=True)]

    def _model(self, place: int) -> GPT:
        model = GPT(self.config)
        values, gradients = self._parts(self.parameters), self._parts(self.gradients)
        for parameter, value, gradient in zip(model.parameters(), values, gradients, strict=True):
            parameter.data, parameter.grad = value[place], gradient[place]
        return model

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        """Make the gradients those of each mean loss on int64 bytes, `(members, lanes, batch, length)`."""
        loss = F.cross_entropy(self._logits(inputs.flatten(0, 1)).flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(self._num_models * loss, list(self._stacks.values()))
        flats = [gradient.flatten(1) for gradient in gradients]
        torch.cat(flats, dim=1, out=self.gradients.view(self._num_models, -1))

    def check(self, inputs: Tensor, targets: Tensor) -> None:
        """Raise unless the gradients are those that the last member's model of the last lane computes."""
        self.backward(inputs, targets)
        row = self.gradients[-1, -1]
        together = row.clone()
        row.zero_()
        torch.autograd.backward(next_byte_loss(self.models[-1][-1], inputs[-1, -1], targets[-1, -1]))
        torch.testing.assert_close(together, row, rtol=1e-3, atol=1e-6)

    def _logits(self, inputs: Tensor) -> Tensor:
        models, batch, length = inputs.shape
        weights, width = self._stacks, self.config.width
        table = weights["bytes.weight"].flatten(0, 1)
        positions = weights["positions.weight"][:, None, :length]
        hidden = (F.embedding(inputs + self._table_offsets, table) + positions).flatten(1, 2)
        for layer in range(self.config.layers):
            block = f"blocks.{layer}."
            normed = _normed(weights, f"{block}norm1", hidden)
            qkv = _linear(weights, f"{block}self_attn.in_proj_", normed)
            split = qkv.view(models * batch, length, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(models, batch * length, width)
            hidden = hidden + _linear(weights, f"{block}self_attn.out_proj.", mixed)
            normed = _normed(weights, f"{block}norm2", hidden)
            wide = F.gelu(_linear(weights, f"{block}linear1.", normed))
            hidden = hidden + _linear(weights, f"{block}linear2.", wide)
        return torch.bmm(_normed(weights, "norm", hidden), weights["head.weight"].transpose(1, 2))


def _linear(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    bias = weights[f"{name}bias"].unsqueeze(1)
    return torch.baddbmm(bias, inputs, weights[f"{name}weight"].transpose(1, 2))


def _normed(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    normed = F.layer_norm(inputs, inputs.shape[-1:])
    return torch.addcmul(weights[f"{name}.bias"].unsqueeze(1), normed, weights[f"{name}.weight"].unsqueeze(1))
