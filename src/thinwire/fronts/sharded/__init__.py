"""The front for FSDP2: equal shards of different replicas are averaged, inside `backward()`."""

from thinwire.fronts.sharded.attaching import attach_sharded

__all__ = ["attach_sharded"]
