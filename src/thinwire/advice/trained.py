"""The training that a model and its optimizer belong to, for the table of losses."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

from thinwire.advice.losses import Training, known_optimizers, name_in_table

SGD_MOMENTUM = 0.9  # in all trainings of the table


def training_of(model: nn.Module, optimizer: str | None, members: int, steps: int | None = None) -> Training:
    """Return the training of a model by an optimizer of this name."""
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kinds = {type(module) for module in model.modules()}
    is_recurrent = any(issubclass(kind, nn.RNNBase | nn.RNNCellBase) for kind in kinds)
    return Training(optimizer, members, numel, steps, is_recurrent)


def optimizer_name(optimizer: object) -> str | None:
    """Return the name under which an optimizer's loss gaps are looked up; None for the worst of all."""
    optimizer = _unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer):
        return name_in_table(optimizer)
    # A subclass of SGD counts as SGD.
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    return next((name for name in names if name in known_optimizers()), names[0])


def notes_on_optimizer(optimizer: object) -> Iterator[str]:
    """Yield how it differs from the optimizer whose loss gaps count."""
    optimizer, name = _unwrapped(optimizer), optimizer_name(optimizer)
    if not isinstance(optimizer, Optimizer) or name not in known_optimizers():
        return
    if (class_name := type(optimizer).__name__) != name:
        yield f"No loss gap was measured with {class_name}: those of {name}, its base class, count."
    if name == "SGD" and not any(group.get("momentum") for group in optimizer.param_groups):
        yield f"Loss gaps of SGD were measured with momentum {SGD_MOMENTUM}; yours has none."


def _unwrapped(optimizer: object) -> object:
    # Frameworks wrap optimizers.
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer
