"""Records of compression at each step of a run, for a file or for the user's own logger."""

from thinwire.watch.records import Run, read_run
from thinwire.watch.watch import Watch
from thinwire.watch.writers import JSONLWriter, MetricsWriter, TensorBoardWriter, Writer

__all__ = ["JSONLWriter", "MetricsWriter", "Run", "TensorBoardWriter", "Watch", "Writer", "read_run"]
