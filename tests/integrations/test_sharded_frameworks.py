"""FSDP2 models that frameworks build: of 2 replicas of 2 shards, attached as docs/sharded.md says."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig as StockConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from fronts.test_sharded import agreed, flat, language, mesh_of, sharded, train
from integrations.test_lightning import Regression, fit, lightning_environment
from pool import Pool
from thinwire import AllReduce, PowerSGD
from thinwire.integrations.accelerate import ParallelismConfig
from training import error_of

POWER = PowerSGD(matrix_rank=2, min_compression_ratio=0.5)


def test_what_accelerate_prepares_with_our_config_is_attached(pool4: Pool) -> None:
    """Accelerate shards on accelerators only: here its own code is called as it calls it."""
    for difference, ratio, is_agreed, refused in pool4.run(_accelerate):
        assert difference <= 1e-9
        assert ratio > 1
        assert is_agreed
        assert "a mesh of two dimensions, ('dp_replicate', 'dp_shard_cp')" in refused


def _accelerate() -> tuple[float, float, bool, str]:
    native = sharded(language(), mesh_of())
    train(native, range(2))
    model, mesh = prepared(ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    sync = thinwire.attach(model, AllReduce(), mesh=mesh["dp_replicate"])
    train(model, range(2))
    difference = (flat(model) - flat(native)).abs().max().item()
    sync.use(POWER)
    train(model, range(2, 4))
    stock, theirs = prepared(StockConfig(dp_replicate_size=2, dp_shard_size=2))
    refused = error_of(lambda: thinwire.attach(stock, POWER, mesh=theirs["dp_replicate"]))
    return difference, sync.stats().compression_ratio, agreed(model), refused


def prepared(config: Any) -> tuple[Any, Any]:
    mesh = config.build_device_mesh("cpu")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=config,
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about how Accelerate asks for the mesh
        return fsdp2_prepare_model(accelerator, language()), mesh


class Sharded(Regression):
    """Shards itself where Lightning asks it to, and is attached where training begins."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (self.layers[0], self.layers[2]):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.layers, mesh=mesh["shard"])
        self.replicas = mesh["replicate"]

    def on_train_start(self) -> None:
        self.sync = thinwire.attach(self.layers, POWER, mesh=self.replicas)
        if self.loaded is not None:
            self.sync.load_state_dict(self.loaded)

    loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sync"] = self.sync.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["sync"]


@pytest.mark.filterwarnings("ignore")
def test_lightnings_model_parallel_strategy(pool4: Pool, tmp_path: Path) -> None:
    for steps, ratio, is_agreed, difference in pool4.run(_lightning, tmp_path):
        assert steps == 6
        assert ratio > 1
        assert is_agreed
        assert difference <= 1e-5


def _lightning(folder: Path) -> tuple[int, float, bool, float]:
    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(
            data_parallel_size=4, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    options: dict[str, Any] = {"model": Sharded}
    _, module = fit(strategy(), folder / "straight", epochs=2, **options)
    first, _ = fit(strategy(), folder / "one", epochs=1, **options)
    path = str(folder / "half.ckpt")
    with lightning_environment():
        first.save_checkpoint(path)
    _, resumed = fit(strategy(), folder / "two", epochs=2, resume=path, **options)
    difference = (flat(module.layers) - flat(resumed.layers)).abs().max().item()
    sync: Any = module.sync
    return sync.steps, sync.stats().compression_ratio, agreed(module.layers), difference
