"""The reference PowerSGD package's names (epfml/powersgd), on Thinwire's core: gradients without DDP.

Change `from powersgd import …` to `from thinwire.powersgd import …`:

    params = list(model.parameters())
    powersgd = PowerSGD(params, config=Config(rank=4, start_compressing_after_num_steps=0))
    ...
    loss.backward()
    optimizer_step(optimizer, powersgd)

docs/migrating.md says what behaves differently. `AlgorithmAggregator` is not part of that package: it takes
any of Thinwire's algorithms.
"""

from thinwire.epfml import Aggregator, AlgorithmAggregator, AllReduce, Config, PowerSGD, optimizer_step

__all__ = ["Aggregator", "AlgorithmAggregator", "AllReduce", "Config", "PowerSGD", "optimizer_step"]
