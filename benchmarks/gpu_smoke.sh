#!/usr/bin/env bash
# Real SGLang on this machine's NVIDIA GPU: the tests, the demo, and what samplestore costs at 256 requests in flight.
#
#     benchmarks/gpu_smoke.sh [RELEASE]
#
# Installs SGLang (make sglang) if it is missing. Ends with 0 if all three passed, with 3 if there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
release=${1:-newest}

if ! nvidia-smi -L 2>/dev/null | grep GPU; then
  echo "No NVIDIA GPU on this machine: nothing was run. On the CPU: make test-sglang" >&2
  exit 3
fi

make sglang SGLANG_RELEASES="$release"
bin=$PWD/.venv/bin
export CI=true  # a release that is missing fails a test instead of skipping it

echo "== contract: SGLang $release"
make test-sglang SGLANG_RELEASES="$release"

echo "== demo"
rm -rf build/gpu-smoke && mkdir -p build/gpu-smoke
"$bin/samplestore" demo --engine sglang --db build/gpu-smoke/rollouts.db --json build/gpu-smoke/demo.json

echo "== overhead at 256 in flight"
"$bin/python" benchmarks/sglang_overhead.py --in-flight 256 --groups 64 --tokens 512

echo "GPU smoke passed on $(nvidia-smi -L | head -n 1)"
