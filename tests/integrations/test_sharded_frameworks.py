"""FSDP2 models that frameworks build: of 2 replicas of 2 shards, attached as docs/sharded.md says."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig as StockConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from accelerated import several_processes
from adapters.test_sharded import agreed, flat
from integrations.test_lightning import Regression, fit
from integrations.test_transformers import new_trainer
from processes import in_each_process
from thinwire import PowerSGD
from thinwire.integrations.accelerate import ParallelismConfig
from thinwire.integrations.transformers import attach as attach_trainer

POWER = PowerSGD(matrix_rank=2, min_compression_ratio=0.5)


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
@in_each_process(4)
def test_the_trainer_shards_and_resumes(tmp_path: Path) -> None:
    """Its parts that shard, save and load are its own; that it does so on CPUs is not."""
    config, ends = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), []
    for resume in (None, f"{tmp_path}/checkpoint-1"):
        with sharding_on_cpus():
            trainer = sharding_trainer(tmp_path, config, max_steps=2, save_steps=1)
            callback = attach_trainer(trainer, POWER)
            trainer.train(resume_from_checkpoint=resume)
            ends.append(flat(trainer.model))
            assert agreed(trainer.model)
            assert callback.sync.stats().compression_ratio > 2
            assert callback.sync.stats().steps == 2
        dist.barrier()
    assert torch.equal(*ends)


@pytest.mark.filterwarnings("ignore")
@in_each_process(4)
def test_the_trainer_averages_shards_of_models(tmp_path: Path) -> None:
    with sharding_on_cpus():
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        trainer = sharding_trainer(tmp_path, config, max_steps=2, save_strategy="no")
        callback = attach_trainer(trainer, partial(thinwire.DiLoCo, every_steps=2))
        trainer.train()
        assert agreed(trainer.model)
        assert callback.sync.stats().compression_ratio > 2
    with sharding_on_cpus():  # the user's own replicas take precedence
        trainer = sharding_trainer(tmp_path, config, max_steps=2, save_strategy="no")
        own = config.build_device_mesh("cpu")["dp_replicate"]
        made = list[bool]()

        def averaging(*trained: Any, replicas: Any, **options: Any) -> thinwire.LocalSGD:
            made.append(replicas is own)
            return thinwire.DiLoCo(*trained, replicas=replicas, every_steps=2, **options)

        attach_trainer(trainer, partial(averaging, replicas=own))
        trainer.train()
        assert made == [True]
    with sharding_on_cpus():
        stock = sharding_trainer(tmp_path, StockConfig(dp_replicate_size=2, dp_shard_size=2))
        with pytest.raises(thinwire.AttachError, match="leaves no replicas for Thinwire"):
            attach_trainer(stock, partial(thinwire.DiLoCo, every_steps=2))
        # Gradients that PyTorch would average can be taken from it.
        for averages in (POWER, thinwire.auto):
            stock.remove_callback(attach_trainer(stock, averages))


class Sharded(Regression):
    """Shards itself where Lightning asks it to, and is attached where training begins."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (self.layers[0], self.layers[2], self.layers):
            fully_shard(layer, mesh=mesh["shard"])
        self.replicas = mesh["replicate"]

    def on_train_start(self) -> None:
        self.sync = thinwire.attach(self.layers, POWER, replicas=self.replicas)


@pytest.mark.filterwarnings("ignore")
@in_each_process(4)
def test_lightnings_model_parallel_strategy(tmp_path: Path) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    _, module = fit(strategy, tmp_path, model=Sharded)
    assert isinstance(module, Sharded)
    assert module.sync.steps == 6
    assert module.sync.stats().compression_ratio > 1
    assert agreed(module.layers)
