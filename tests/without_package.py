"""`python -m MODULE …`, as where packages are not installed: `without_package.py PACKAGE,PACKAGE MODULE …`.

In a forked process that has imported everything: it forgets the packages, and what has them.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    packages, module = sys.argv[1].split(","), sys.argv[2]
    del sys.argv[1:3]
    for name in [name for name in sys.modules if name.partition(".")[0] in (*packages, "thinwire", "typer")]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    runpy.run_module(module, run_name="__main__")
