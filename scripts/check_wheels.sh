#!/usr/bin/env bash
# Installs the wheels of a folder, dist by default, as a user without a compiler does, and runs the quick
# tests on them, on a GPU if there is one. Each wheel of CUDA kernels is also tried by itself.
#
#   bash scripts/check_wheels.sh [FOLDER [ARGUMENTS OF PYTEST]]
#
# Environment:
#   PYTHON   the interpreter, python3 by default
#   JAX      what to install as JAX, "jax" (the newest) by default; "jax==0.10.2", for example
#   VENV     where the virtual environment is made, a temporary folder by default
set -euo pipefail
cd "$(dirname "$0")/.."

dist=$(realpath "${1:-dist}")
shift $(($# > 0))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${VENV:-$work/venv}
"${PYTHON:-python3}" -m venv "$venv"
# Nothing but the environment on PATH: no compiler, no CMake.
run() { env PATH="$venv/bin" PYTHONSAFEPATH=1 "$venv/bin/python" "$@"; }
pip() { run -m pip --quiet --disable-pip-version-check "$@"; }
# An environment that is used again may have the same version with other contents.
install_wheels() { pip install --pre --no-index --no-deps --force-reinstall --find-links "$dist" "$@"; }

# The package from its wheel alone, and then what the tests need, which includes JAX.
install_wheels rwkv-jax
pip install "rwkv-jax[test]" "${JAX:-jax}" pyright

check() {
  printf '\n== %s (after %s s)\n' "$*" "$SECONDS"
  run - "$@" <<'PYTHON_CODE'
import platform
import sys

import jax
import rwkv_jax

info = rwkv_jax.build_info()
print("Python", platform.python_version(), "jax", jax.__version__, "rwkv-jax", rwkv_jax.__version__, info)
needed = ["cpu", "cuda"] if len(sys.argv) > 2 else ["cpu"]
assert all(info["missing"][platform] is None for platform in needed), info
PYTHON_CODE
}
# Compiling programs for the CPU is most of the time of the tests.
export XLA_FLAGS="--xla_backend_optimization_level=1 ${XLA_FLAGS-}"
quick_tests() { run -m pytest -q -n "$(nproc)" --dist worksteal -p no:cacheprovider -m "not slow" "$@"; }

cuda=()
for major in 12 13; do
  if compgen -G "$dist/rwkv_jax_cuda$major-*.whl" >/dev/null; then cuda+=("rwkv-jax-cuda$major"); fi
done
for kernels in "${cuda[@]}"; do
  install_wheels "$kernels"
  check rwkv-jax "$kernels"
  quick_tests tests/test_native_modules.py
  pip uninstall --yes "$kernels"
done

cat >"$work/typed.py" <<'PYTHON_CODE'
# pyright: strict
import jax
import rwkv_jax


def step(x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, state = rwkv_jax.wkv7_step(x, x, x, x, x, x, state, decay="sigmoid")
    return y, state
PYTHON_CODE
(cd "$work" && env PATH="$venv/bin:$PATH" pyright --pythonpath "$venv/bin/python" typed.py)

# Of several wheels of CUDA kernels the package takes that for the CUDA version of JAX.
((${#cuda[@]} == 0)) || install_wheels "${cuda[@]}"
check rwkv-jax "${cuda[@]}"
quick_tests tests "$@"
