#!/usr/bin/env bash
# Checks the style of Python, C++ and CUDA, the types, and the workflows of GitHub Actions, with tools of
# the versions that pyproject.toml names. Environment:
#   PYTHON                the interpreter, python3 by default
#   VENV                  where the virtual environment is, .venv-lint by default; it is kept between runs
#   PYTHON_WITH_PACKAGES  an interpreter that has what the test extra installs, for the type checker;
#                         by default that is installed beside the tools
set -euo pipefail
shopt -s globstar nullglob

venv=${VENV:-$(dirname "$0")/../.venv-lint}
# --upgrade-deps: the pip of Python 3.11 knows neither --group nor --only-deps.
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv --upgrade-deps "$venv"
venv=$(cd "$venv" && pwd)
cd "$(dirname "$0")/.."
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --group lint
[ -n "${PYTHON_WITH_PACKAGES:-}" ] || pip install --only-deps '.[test]'

export PATH=$venv/bin:$PATH
ruff check
ruff format --check
clang-format --dry-run -Werror {ffi,tests}/**/*.{h,cc,cu,cuh}
jactionlint --shellcheck=
pyright --pythonpath "${PYTHON_WITH_PACKAGES:-$venv/bin/python}"
