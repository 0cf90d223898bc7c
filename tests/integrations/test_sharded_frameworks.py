"""FSDP2 models that frameworks build: of 2 replicas of 2 shards, attached as docs/sharded.md says."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig as StockConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from accelerated import several_processes
from fronts.test_sharded import agreed, flat, language, mesh_of, sharded, train
from integrations.test_lightning import Regression, fit, lightning_environment
from integrations.test_transformers import new_trainer
from pool import Pool
from thinwire import AllReduce, PowerSGD
from thinwire.integrations.accelerate import ParallelismConfig
from thinwire.integrations.transformers import attach as attach_trainer
from training import error_of

POWER = PowerSGD(matrix_rank=2, min_compression_ratio=0.5)


def test_what_accelerate_prepares_with_our_config_is_attached(pool4: Pool) -> None:
    """Accelerate shards on accelerators only: here its own code is called as it calls it."""
    for differences, ratios, are_agreed in pool4.run(_accelerate):
        assert len(differences) == 2
        assert max(differences) <= 1e-9
        assert min(ratios) > 1
        assert are_agreed


def _accelerate() -> tuple[list[float], list[float], bool]:
    native = sharded(language(), mesh_of())
    train(native, range(2))
    differences, ratios, are_agreed = [], [], True
    for config in (ParallelismConfig, StockConfig):  # the stock one makes native HSDP
        model, mesh = prepared(config(dp_replicate_size=2, dp_shard_size=2))
        sync = thinwire.attach(model, AllReduce(), replicas=mesh["dp_replicate"])
        train(model, range(2))
        differences.append((flat(model) - flat(native)).abs().max().item())
        sync.use(POWER)
        train(model, range(2, 4))
        ratios.append(sync.stats().compression_ratio)
        are_agreed = are_agreed and agreed(model)
    return differences, ratios, are_agreed


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


@contextmanager
def sharding_on_cpus() -> Iterator[None]:
    """Let Accelerate shard on CPUs: its state says what it says where there are accelerators."""
    init = AcceleratorState.__init__

    def sharding(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, kwargs["fsdp_plugin"]
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with (
        several_processes(),
        patch.object(AcceleratorState, "__init__", sharding),
        patch.dict(os.environ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of torch, about how Accelerate asks for the mesh
        yield


def sharding_trainer(folder: Path, config: Any, **settings: Any) -> Any:
    return new_trainer(
        str(folder),
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]},
        parallelism_config=config,
        gradient_accumulation_steps=2,
        **settings,
    )


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_shards_and_resumes(pool4: Pool, tmp_path: Path) -> None:
    """Its parts that shard, save and load are its own; that it does so on CPUs is not."""
    for found in pool4.run(_trainer, tmp_path):
        assert found["ratio"] > 2
        assert found["agreed"]
        assert found["straight"] == found["resumed"] == found["native"]
        assert found["steps"] == 4
        assert found["own mesh"] == [True]
        is_agreed, ratio = found["local"]  # shards of models, averaged every so many steps
        assert is_agreed
        assert ratio > 2
        assert "leaves no replicas to Thinwire" in found["stock"]


def _trainer(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in {
        "straight": {},
        "resumed": {"resume_from_checkpoint": f"{folder}/checkpoint-2"},
    }.items():
        with sharding_on_cpus():
            config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
            trainer = sharding_trainer(folder, config, max_steps=4, save_steps=2)
            callback = attach_trainer(trainer, POWER)
            trainer.train(**settings)
            found[name] = flat(trainer.model).double().sum().item()
            found["agreed"], found["ratio"] = agreed(trainer.model), callback.sync.stats().compression_ratio
            found["steps"] = callback.sync.stats().steps
        dist.barrier()
    with sharding_on_cpus():
        trainer = sharding_trainer(folder, config, max_steps=2, save_strategy="no")
        own = config.build_device_mesh("cpu")["dp_replicate"]
        made = list[bool]()

        def averaging(*trained: Any, mesh: Any, **options: Any) -> thinwire.LocalSGD:
            made.append(mesh is own)
            return thinwire.DiLoCo(*trained, replicas=mesh, every_steps=2, **options)

        callback = attach_trainer(trainer, partial(averaging, mesh=own))
        trainer.train()
        found["own mesh"] = made
        found["local"] = (agreed(trainer.model), callback.sync.stats().compression_ratio)
    with sharding_on_cpus():
        stock = sharding_trainer(folder, StockConfig(dp_replicate_size=2, dp_shard_size=2))
        found["stock"] = error_of(lambda: attach_trainer(stock, partial(thinwire.DiLoCo, every_steps=2)))
    with sharding_on_cpus():
        stock = StockConfig(dp_replicate_size=2, dp_shard_size=2)
        trainer = sharding_trainer(folder / "native", stock, max_steps=4, save_steps=2)
        attach_trainer(trainer, POWER)
        trainer.train()
        found["native"] = flat(trainer.model).double().sum().item()
    return found


class Sharded(Regression):
    """Shards itself where Lightning asks it to, and is attached where training begins."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (self.layers[0], self.layers[2]):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.layers, mesh=mesh["shard"])
        self.replicas = mesh["replicate"]

    def on_train_start(self) -> None:
        self.sync = thinwire.attach(self.layers, POWER, replicas=self.replicas)
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
