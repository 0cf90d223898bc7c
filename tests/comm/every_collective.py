"""Every collective of a transport, with every type it carries: what all transports promise."""

from __future__ import annotations

import torch

from thinwire.comm import Transport

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGER = [torch.uint8, torch.int32, torch.int64]
# Zero-length: parameters without elements, members without a share.
LENGTHS = [0, 1, 5]


def tensor_of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_every_collective(transport: Transport) -> None:
    """To be called on all members, on the CPU."""
    rank, size = transport.rank, transport.size
    assert transport.control_device == torch.device("cpu")
    for numel in LENGTHS:
        for dtype in [*FLOATING, *INTEGER]:
            brought = torch.stack([tensor_of(other, dtype, numel) for other in range(size)])
            total, largest = brought[rank].clone(), brought[rank].clone()
            works = [
                transport.all_reduce(total, "a sum"),
                transport.all_reduce(largest, "a maximum", operation="max"),
            ]
            for work in reversed(works):  # in any order
                work.wait()
            assert torch.equal(total, brought.double().sum(0).to(dtype)), (dtype, numel)
            assert torch.equal(largest, brought.double().amax(0).to(dtype)), (dtype, numel)
            if dtype in FLOATING:
                mean = brought[rank].clone()
                transport.mean(mean, "a mean").wait()
                torch.testing.assert_close(mean, brought.double().mean(0).to(dtype))
        for dtype in [*FLOATING, *INTEGER, torch.bool]:
            own = tensor_of(rank, dtype, numel)
            rows = torch.empty(size, numel, dtype=dtype)
            transport.all_gather(rows, own, "a gather").wait()
            assert torch.equal(own, tensor_of(rank, dtype, numel))
            expected = torch.stack([tensor_of(other, dtype, numel) for other in range(size)])
            assert torch.equal(rows, expected), (dtype, numel)

            exchanged = torch.empty(size, numel, dtype=dtype)
            transport.all_to_all(exchanged, tensor_of(rank, dtype, size, numel), "an exchange").wait()
            expected = torch.stack([tensor_of(other, dtype, size, numel)[rank] for other in range(size)])
            assert torch.equal(exchanged, expected), (dtype, numel)

            copied = own.clone()
            transport.broadcast(copied, size - 1, "a copy").wait()
            assert torch.equal(copied, tensor_of(size - 1, dtype, numel)), (dtype, numel)
    # In half precision the sum would overflow.
    large = torch.full((1,), 60_000.0, dtype=torch.float16)
    transport.mean(large, "a mean").wait()
    assert large.tolist() == [60_000.0]
    # Reduced and gathered in parts of unlike lengths.
    lengths = [3 * member for member in range(size)]
    parts = tensor_of(rank, torch.float32, sum(lengths))
    transport.scatter_mean(parts, lengths, "a mean in parts").wait()
    transport.gather_parts(parts, lengths, "a gather of parts").wait()
    everyone = [tensor_of(other, torch.float32, sum(lengths)) for other in range(size)]
    torch.testing.assert_close(parts, torch.stack(everyone).mean(0))
