"""axolotl: small messages from its YAML file.

    plugins:
      - thinwire.integrations.axolotl.ThinwirePlugin
    thinwire_bits: 4

or `thinwire_algorithm: PowerSGD(matrix_rank=4)`, or `thinwire_algorithm: auto()`.
"""

from __future__ import annotations

from typing import Any

from thinwire.errors import ConfigError, MissingExtraError
from thinwire.integrations.transformers import attach

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as error:
    raise MissingExtraError(
        "thinwire.integrations.axolotl needs axolotl: install it, and start training with axolotl train"
    ) from error

__all__ = ["ThinwireArgs", "ThinwirePlugin"]


class ThinwireArgs(BaseModel):
    """The plugin's settings in axolotl's file; give exactly one of the two.

    Attributes:
        thinwire_bits: Bits per gradient element, as in `thinwire.Quantize(bits=…)`.
        thinwire_algorithm: As written in Python, such as `PowerSGD(matrix_rank=4)`; or `auto()`.
    """

    thinwire_bits: int | None = None
    thinwire_algorithm: str | None = None


class ThinwirePlugin(BasePlugin):
    """Attaches axolotl's trainer; see `thinwire.integrations.transformers.attach`.

    Raises:
        ConfigError: The settings are wrong.
        AttachError: The trainer can't be attached.
    """

    def get_input_args(self) -> str:
        return f"{ThinwireArgs.__module__}.{ThinwireArgs.__qualname__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        bits, text = cfg.thinwire_bits, cfg.thinwire_algorithm
        if (bits is None) == (text is None):
            raise ConfigError(
                f"got both thinwire_bits={bits} and thinwire_algorithm={text!r}; set only one of them, such "
                "as thinwire_bits: 4"
            )
        attach(trainer, text or f"Quantize(bits={bits})")
