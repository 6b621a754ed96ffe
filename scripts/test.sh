#!/usr/bin/env bash
# Installs the package with its test extra into a virtual environment of its own and runs the tests
# on what was installed. Arguments are handed to pytest. Environment:
#   PYTHON   the interpreter, python3 by default
#   VENV     where the virtual environment is, .venv-test by default; it is kept between runs
#   EXTRAS   what to install beside the package, test by default; test,cuda13 on a machine with a GPU
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${VENV:-$root/.venv-test}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip wheel --no-deps --wheel-dir "$wheels" "$root"
wheel=$(echo "$wheels"/*.whl)
pip install "$wheel[${EXTRAS:-test}]"
# In an environment of an earlier run the version is the same and the contents may not be.
pip install --no-deps --force-reinstall "$wheel"

# Only the installed package can be imported: no PYTHONPATH, and no working directory on sys.path, in
# this process and in those that tests start.
unset PYTHONPATH
export PYTHONSAFEPATH=1
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

workers=$("$venv/bin/python" -c 'import os; print(min(os.cpu_count() or 1, 8))')
"$venv/bin/python" -m pytest -n "$workers" --dist worksteal "$@"
