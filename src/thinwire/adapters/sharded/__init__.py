"""The adapter for FSDP2: equal shards of different replicas are averaged, inside `backward()`."""
