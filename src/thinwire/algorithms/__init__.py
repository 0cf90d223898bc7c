"""Algorithms: how gradients become their mean over the group, as frozen configs and pure tensor code."""

from thinwire.algorithms.base import Algorithm, Bucket, BucketPlan, Diagnosis, Memory, Slot
from thinwire.algorithms.exact import AllReduce, Cast
from thinwire.algorithms.lowrank.batched import BatchedPowerSGD
from thinwire.algorithms.lowrank.powersgd import PowerSGD
from thinwire.algorithms.quantize import Quantize
from thinwire.algorithms.requests import (
    AllFinite,
    AllGather,
    AllToAll,
    CollectiveRequest,
    Commit,
    Jointly,
    Mean,
    Request,
    Requests,
)
from thinwire.algorithms.topk import TopK
from thinwire.kernels.dispatch import all_finite

__all__ = [
    "Algorithm",
    "AllFinite",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BatchedPowerSGD",
    "Bucket",
    "BucketPlan",
    "Cast",
    "CollectiveRequest",
    "Commit",
    "Diagnosis",
    "Jointly",
    "Mean",
    "Memory",
    "PowerSGD",
    "Quantize",
    "Request",
    "Requests",
    "Slot",
    "TopK",
    "all_finite",
]
