"""Waits for torch's DDP to be imported, and attaches each model that is built.

Every Python process under `thinwire attach` runs this, so it imports next to nothing.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MODULE = "torch.nn.parallel.distributed"
BUILT = "THINWIRE_ATTACH_BUILT"  # set once this process, or one that started it, has built a DDP model


class DDPFinder:
    """Finds one module, once, and changes its DDP class after the module has run."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        from importlib.util import find_spec  # noqa: PLC0415

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: ModuleType) -> None:
                run(module)
                watch_built(module.DistributedDataParallel)

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


def watch_built(ddp: Any) -> None:
    """Attach each model of a DDP class once it is built."""
    from functools import wraps  # noqa: PLC0415

    build = ddp.__init__

    @wraps(build)
    def build_and_note(model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        os.environ[BUILT] = "1"
        # Imported here, so that a process that builds no DDP model imports nothing of Thinwire.
        from thinwire.preload.built_model import note_built  # noqa: PLC0415

        note_built(model)

    ddp.__init__ = build_and_note


def end_process() -> None:
    """Print at the end of a job's first process, or of one that trained alone, that it built no DDP model."""
    if "thinwire.preload.built_model" in sys.modules:
        return
    if "thinwire.sync" in sys.modules:  # the script attaches by itself
        from thinwire.preload.strict import note_averaged  # noqa: PLC0415

        note_averaged()
        return
    if os.environ.get("RANK", "0") != "0" or MODULE not in sys.modules:
        return
    trains = os.environ.get("WORLD_SIZE", "1") != "1" or has_trained()
    # Processes that a rank spawns, such as data workers, inherit its RANK. A script that failed has said why.
    if trains and BUILT not in os.environ and getattr(sys, "last_value", None) is None:
        print(
            "thinwire attach: nothing was attached: no DistributedDataParallel was built. If this was the "
            "only process, start several, such as by torchrun; FSDP2 takes thinwire.attach in the script "
            "(docs/sharded.md), FSDP1 and DeepSpeed average by themselves",
            file=sys.stderr,
        )


def has_trained() -> bool:
    """Return whether this process trains: a launcher may make the optimizer, but records no graph."""
    kinds = [sys.modules["torch.optim"].Optimizer]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    # The first of a class is what has its steps profiled. Evaluations and data workers make none.
    made_an_optimizer = any(hasattr(kind.step, "hooked") for kind in kinds)
    from thinwire.torch_private import has_recorded_a_graph  # noqa: PLC0415

    return made_an_optimizer and has_recorded_a_graph()


sys.meta_path.insert(0, DDPFinder())
# Registered first, so that it runs last, after the functions that the script registers.
atexit.register(end_process)
