#!/usr/bin/env bash
# Builds the documentation into a folder, out/site if none is given; any warning, such as a link to
# nothing, is an error. The sources of the package are read, and the notebooks import them, on the CPU; so
# the package need not be installed. Environment:
#   PYTHON   the interpreter, python3 by default
#   VENV     where the virtual environment is, .venv-docs by default; it is kept between runs
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
site=$(realpath -m "${1:-$root/out/site}")
venv=$(realpath -m "${VENV:-$root/.venv-docs}")
cd "$root"

# --upgrade-deps: the pip of Python 3.11 does not know --group.
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv --upgrade-deps "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --group docs
export NO_MKDOCS_2_WARNING=1 # an announcement of the theme
export JAX_PLATFORMS=cpu
# Compiling is most of the time of the notebooks.
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 ${XLA_FLAGS-}"
"$venv/bin/python" -m mkdocs build --strict --config-file docs/mkdocs.yml --site-dir "$site"
echo "$site/index.html"
