"""Records of compression at each step of a run, for a file or for the user's own logger."""

from typing import TYPE_CHECKING

from thinwire.lazy import import_later
from thinwire.watch.records import Run, read_run

__all__ = ["JSONLWriter", "MetricsWriter", "Run", "TensorBoardWriter", "Watch", "Writer", "read_run"]

if TYPE_CHECKING:
    from thinwire.watch.watch import Watch
    from thinwire.watch.writers import JSONLWriter, MetricsWriter, TensorBoardWriter, Writer
else:
    __getattr__, __dir__ = import_later(__name__, dict.fromkeys(__all__, "writers") | {"Watch": "watch"})
