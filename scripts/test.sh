#!/usr/bin/env bash
# Installs the package with its test extra into a virtual environment of its own and runs the tests
# on what was installed: the quick ones (tests/conftest.py says which), or all of them.
#
#   bash scripts/test.sh                   quick tests; minutes on two CPU cores
#   bash scripts/test.sh --all             all tests
#   bash scripts/test.sh [--all] -k step   other arguments go to pytest
#
# CUDA kernels are compiled where there is a GPU, for its architecture, or where RWKV_JAX_CUDA or
# RWKV_JAX_CUDA_ARCHS is set. Environment besides:
#   PYTHON   the interpreter, python3 by default
#   VENV     where the virtual environment is, .venv-test by default; it is kept between runs
#   EXTRAS   what to install beside the package: test, and with a GPU cuda13 or cuda12 by default
#   TORCH    a requirement, such as torch==2.13.0: installs it and the rwkv package, with which tests
#            then compare the models; TORCH_INDEX is the package index that torch comes from
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${VENV:-$root/.venv-test}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

which=(-m "not slow")
native=ON
if [[ ${1-} == --all ]]; then
  which=()
  native=OFF
  shift
fi
# The quick tests run the kernels of one instruction set, so no other is compiled.
export RWKV_JAX_NATIVE=${RWKV_JAX_NATIVE-$native}

source "$root/scripts/gpu.sh"

step() { printf '\n== %s (after %s s)\n' "$1" "$SECONDS"; }

step "installation into $venv"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip wheel --no-deps --wheel-dir "$wheels" "$root" &
building=$!
extras=${EXTRAS:-test${cuda_extra:+,$cuda_extra}}
# --no-compile: compiling all modules, of which few are imported, takes longer than copying them.
if [[ -n ${TORCH-} ]]; then
  pip install --no-compile ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
  extras+=,official
fi
wait "$building"
wheel=$(echo "$wheels"/*.whl)
pip install --no-compile "$wheel[$extras]"
# In an environment of an earlier run the version is the same and the contents may not be.
pip install --no-deps --force-reinstall "$wheel"

# Only the installed package can be imported: no PYTHONPATH, and no working directory on sys.path, in
# this process and in those that tests start.
unset PYTHONPATH
export PYTHONSAFEPATH=1
# Compiling programs for the CPU is most of the time of the tests. Many are small: LLVM gets each of them
# whole, not in 32 parts, and does not optimise it.
quick="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# The compiler of fusions, through MLIR, takes longer than all the rest. Later versions of jaxlib have no
# other one, and end at the sight of a flag that they do not know.
other="--xla_cpu_use_fusion_emitters=false"
if XLA_FLAGS=$other JAX_PLATFORMS=cpu "$venv/bin/python" -c 'import jax; jax.devices()' 2>/dev/null; then
  quick+=" $other"
fi
export XLA_FLAGS="$quick ${XLA_FLAGS-}"
cd "$root"
"$venv/bin/python" - "$root/rwkv_jax" <<'PYTHON_CODE'
import pathlib
import sys

import jax
import rwkv_jax

where = pathlib.Path(rwkv_jax.__file__).parent
assert where != pathlib.Path(sys.argv[1]), f"{where} is the source tree, not an installation"
print(f"rwkv_jax {rwkv_jax.__version__} in {where}, jax {jax.__version__}", rwkv_jax.build_info())
PYTHON_CODE

step "tests"
workers=$("$venv/bin/python" -c 'import os; print(min(os.cpu_count() or 1, 8))')
"$venv/bin/python" -m pytest -n "$workers" --dist worksteal ${which[@]+"${which[@]}"} "$@"
