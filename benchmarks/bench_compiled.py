"""Codes of few bits on a GPU: PyTorch's functions, the same under `torch.compile`, and Triton's kernels.

Of as many gradients as GPT-2 small's blocks have, a bucket each, as one of two members does them. Events time
them, while the device sleeps until all of it is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from bench_triton import ASLEEP_CYCLES, copied_bytes_per_second, two_events
from pages import markdown_table, page
from thinwire.kernels.backend import CodeKernels, MeanArgs
from thinwire.kernels.torch_codes import CODES
from thinwire.kernels.triton import triton_codes
from thinwire.tensors.blocks import Blocks
from thinwire.tensors.coded import CODEBOOKS, Codebook, Coded

BUCKETS, ELEMENTS = 12, 12 * 768 * 768  # all alike: each shape would be compiled by itself
BLOCK, MEMBERS, UNTIMED, TIMED = 128, 2, 3, 10
WAYS: dict[str, CodeKernels] = {
    "PyTorch": CODES,
    "torch.compile": replace(
        CODES,
        encoded=torch.compile(CODES.encoded, dynamic=False),
        averaged=torch.compile(CODES.averaged, dynamic=False),
        decode=torch.compile(CODES.decode, dynamic=False),
    ),
    "Triton": triton_codes.CODES,
}


def milliseconds(run: Callable[[], object]) -> str:
    for _ in range(UNTIMED):
        run()
    took = []
    for _ in range(TIMED):
        before, after = two_events()
        torch.cuda.synchronize()
        torch.cuda._sleep(ASLEEP_CYCLES)  # type: ignore[no-untyped-call]
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        took.append(before.elapsed_time(after))
    return f"{median(took):.3f}"


def timed(
    kernels: CodeKernels, codebook: Codebook, flats: list[torch.Tensor], cut: list[Blocks]
) -> list[str]:
    """Return the milliseconds of coding, of averaging what two have coded, and of decoding the means."""

    def encode() -> list[Coded]:
        return [kernels.encoded(flat, blocks, codebook) for flat, blocks in zip(flats, cut, strict=True)]

    sent = encode()

    def average() -> list[Coded]:
        return [
            kernels.averaged(
                MeanArgs(message, blocks, blocks.shares[0], codebook, lost=None, dtype=torch.float32)
            )
            for message, blocks in zip(sent, cut, strict=True)
        ]

    def decode() -> None:
        for flat, message, blocks in zip(flats, sent, cut, strict=True):
            kernels.decode([message], blocks, codebook, flat)

    return [milliseconds(run) for run in (encode, average, decode)]


def main() -> None:
    cut = [Blocks((ELEMENTS,), BLOCK, MEMBERS) for _ in range(BUCKETS)]
    rows = []
    for bits in (4, 2):
        for name, kernels in WAYS.items():
            torch.manual_seed(0)
            flats = [torch.randn(ELEMENTS, device="cuda") for _ in cut]
            rows.append([str(bits), name, *timed(kernels, CODEBOOKS[bits], flats, cut)])
            print(*rows[-1], flush=True)
    print(
        page(
            "Codes of few bits on a GPU, three ways",
            f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; {BUCKETS} buckets of "
            f"{ELEMENTS:,} gradients, blocks of {BLOCK}, {MEMBERS} members; device time, medians of {TIMED}; "
            f"a copy reads and writes {copied_bytes_per_second() / 1e9:,.0f} GB/s.",
            markdown_table(["bits", "by", "encode, ms", "average, ms", "decode, ms"], rows),
        )
    )


if __name__ == "__main__":
    main()
