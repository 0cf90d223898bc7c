"""Runs a script, `with_callback.py SCRIPT …`, with ThinwireCallback among its Trainer's callbacks."""

import runpy
import sys
from functools import wraps
from typing import Any

from transformers import Trainer

from thinwire.integrations.transformers import ThinwireCallback

make = Trainer.__init__


@wraps(make)
def make_with_callback(self: Trainer, *positional: Any, **named: Any) -> None:
    named["callbacks"] = [*(named.get("callbacks") or ()), ThinwireCallback("4 bits")]
    make(self, *positional, **named)


Trainer.__init__ = make_with_callback  # type: ignore[method-assign]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
