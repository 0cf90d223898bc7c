"""The adapter for FSDP2: average equal shards of different replicas, inside `backward()`."""
