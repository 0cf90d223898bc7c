"""A plugin of axolotl's, for `without_code.py`: each run starts from the same weights."""

from __future__ import annotations

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin


class SeededPlugin(BasePlugin):  # type: ignore[misc] # axolotl is untyped
    """Seeds what initializes the model; axolotl seeds only what comes after it."""

    def pre_model_load(self, cfg: Any) -> None:
        torch.manual_seed(0)
