"""The lines to paste run as they are; those of frameworks in the frameworks' own tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pasted import handles, lines_for, run
from processes import in_each_process


@in_each_process(2)
def test_lines_for_ddp_and_fsdp2_run_as_they_are() -> None:
    names: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
        "fully_shard": fully_shard,
        "SGD": torch.optim.SGD,
    }

    def loop() -> None:
        model = names["ddp_model" if "attach(ddp_model" in text else "model"]
        for _ in range(4):
            torch.autograd.backward(model(torch.ones(2, 64)).square().mean())
            names["optimizer"].step()
            names["optimizer"].zero_grad()

    names["loop"] = loop
    with handles() as made:
        for text in (lines_for("DDP"), lines_for("FSDP2")):
            torch.manual_seed(1)
            names["model"] = nn.Linear(64, 64)
            names["ddp_model"] = DistributedDataParallel(names["model"])
            names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
            # Of a model that the lines shard it can be made in between only, as they say.
            made_there = "optimizer = SGD(model.parameters(), lr=0.1)"
            run(text.replace("# make the optimizer here, of the shards", made_there), names)
        assert len(made) == 2
        assert min(sync.stats().compression_ratio for sync in made) > 5
