"""axolotl's own plugin manager with our plugin; where axolotl is installed."""

from __future__ import annotations

from typing import Any

import pytest

base = pytest.importorskip("axolotl.integrations.base")
dicts = pytest.importorskip("axolotl.utils.dict")


@pytest.fixture
def manager() -> Any:
    manager = base.PluginManager.get_instance()
    manager.register("thinwire.integrations.axolotl.ThinwirePlugin")
    return manager


def test_its_settings_stand_in_axolotls_file(manager: Any) -> None:
    from axolotl.integrations.config import merge_input_args  # noqa: PLC0415

    _, settings = merge_input_args()
    assert {"thinwire_bits", "thinwire_algorithm"} <= settings.model_fields.keys()


@pytest.mark.parametrize("settings", [{}, {"thinwire_bits": 4, "thinwire_algorithm": "auto()"}])
def test_none_or_both_are_refused(manager: Any, settings: dict[str, Any]) -> None:
    from thinwire import ConfigError  # noqa: PLC0415

    with pytest.raises(ConfigError, match="thinwire_bits"):
        manager.post_trainer_create(dicts.DictDefault(settings), object())
