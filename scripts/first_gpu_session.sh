#!/usr/bin/env bash
# The first ten minutes on a machine with a GPU: whether Triton's kernels serve there, whether the tests pass,
# what steps and kernels cost. From a clone, with torch, Triton and pytest installed:
#
#   scripts/first_gpu_session.sh                      # logs in build/gpu
#   OUT=… PYTHON=… scripts/first_gpu_session.sh
#
# Beside each figure stands that of an H100 (torch 2.11, Triton 3.6, Python 3.12), which took 159 s for all
# (benchmarks/results/2026-11-26-gpu-h100.md).
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu} PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH=src:tests:benchmarks PYTHONUNBUFFERED=1
failed=()

stage() { # name, seconds, command …
  local name=$1 limit=$2 begun=$SECONDS result=0
  shift 2
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1 || result=$?
  [ $result = 0 ] || failed+=("$name")
  [ $result = 124 ] && echo "ended after $limit s, unfinished" >> "$OUT/$name.log"
  printf '\n%s: %s, %d s, %s\n' "$name" "$([ $result = 0 ] && echo "done" || echo "FAILED ($result)")" \
    $((SECONDS - begun)) "$OUT/$name.log"
}

beside() { # what it is, log, how its line begins, its place in the line, what an H100 gave
  local found
  found=$(awk -F'|' -v line="$3" -v place="$4" 'index($0, line) == 1 { gsub(/ /, "", $place); print $place; exit }' \
    "$OUT/$2.log")
  printf '  %-44s %10s %10s\n' "$1" "${found:-none}" "$5"
}

heads() { printf '  %-44s %10s %10s\n' "$1" here H100; }

# Without a C compiler or a place for its cache (TRITON_CACHE_DIR) Triton compiles nothing: the log says what is
# missing, and all that follows is of PyTorch's kernels.
stage triton 60 "$PYTHON" -W error -c '
import sys, torch
from thinwire.kernels.triton.limits import can_be_used, installed
print(torch.cuda.get_device_name(), "torch", torch.__version__, "Triton", installed(), sys.version)
sys.exit(not can_be_used())'
tail -n 3 "$OUT/triton.log"

# pytest-benchmark warns beside pytest-xdist, and warnings are errors here.
stage tests 270 "$PYTHON" -m pytest tests/gpu -q -p no:benchmark -p no:cacheprovider
tail -n 1 "$OUT/tests.log"
echo "  (H200: 171 passed, 61 s by four workers)"

stage check 120 "$PYTHON" -m thinwire check --device cuda
grep -v -E '^works|^thinwire: process' "$OUT/check.log" | head -n 3
heads "a step of GPT-2 small by itself"
beside "AllReduce, ms" check "| AllReduce()" 3 1.43
beside "4 bits, ms" check "| Quantize(bits=4)" 3 3.15
beside "matrix rank 4, ms" check "| PowerSGD(matrix_rank=4)" 3 2.81

stage bench 120 "$PYTHON" benchmarks/bench_triton.py
heads "a kernel's share of a copy's speed"
step="| GPT-2 small, rank 4 |"
beside "matrix rank 4, products" bench "$step products f4 " 7 83%
beside "matrix rank 4, projections" bench "$step projections f4 " 7 95%
beside "matrix rank 4, reconstruct" bench "$step reconstruct f4 " 7 77%
beside "4 bits, encode" bench "| GPT-2 small, 4 bits | encode f4 " 7 68%
beside "4 bits, average" bench "| GPT-2 small, 4 bits | average f4 " 7 21%
beside "4 bits, decode" bench "| GPT-2 small, 4 bits | decode f4 " 7 78%
heads "a step of matrix rank 4, ms"
beside "the host: all buckets started" bench "$step 13 " 4 1.85
beside "the host: the step finished" bench "$step 13 " 5 0.54
beside "the GPU" bench "$step 13 " 6 1.80

stage compiled 120 "$PYTHON" benchmarks/bench_compiled.py
grep '^|' "$OUT/compiled.log"

# Two hosts share the GPU, each with a slow link of its own; half a minute of it is the models' first broadcast.
stage network 240 "$PYTHON" benchmarks/bench_network.py --device cuda --size gpt2 --rates 1gbit --rounds 2 --steps 2 \
  --contenders 'Cast("bf16")' 'Quantize(bits=4)' 'PowerSGD(matrix_rank=4)' 'PyTorch PowerSGD 4, one bucket'
grep '^|' "$OUT/network.log"

stage elastic 60 "$PYTHON" -m thinwire run --min 2 --max 2 examples/elastic_diloco.py
tail -n 2 "$OUT/elastic.log"

[ ${#failed[@]} = 0 ] || { printf '\nFAILED: %s\n' "${failed[*]}"; exit 1; }
