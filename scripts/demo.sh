#!/usr/bin/env bash
# Trains a small RWKV-7 language model on the sources of Python's standard library, in minutes on
# two CPU cores, and lets it continue "def ". Needs Python 3.11 to 3.13 with pip and a C++ compiler; a
# GPU is used if there is one.
#
#   bash scripts/demo.sh                  options go to scripts/train.py, such as --resume, or
#                                         --steps 1000 for a better model; the model goes to out/demo
#   PYTHON=python3.12 bash scripts/demo.sh          with this Python (python3 if not given)
#   DEMO_VENV=venvs/demo bash scripts/demo.sh       virtual environment there (.venv-demo if not given)
#   DEMO_VENV=none bash scripts/demo.sh             no virtual environment and no download: $PYTHON has
#                                                   all packages, those of the build among them
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${DEMO_VENV:-.venv-demo}

source scripts/gpu.sh
extras=train${cuda_extra:+,$cuda_extra}

if [[ $venv == none ]]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps .
else
  echo "Installing rwkv-jax[$extras] into $venv"
  "$python" -m venv "$venv"
  python=$venv/bin/python
  # The build uses the JAX of this environment, not one of its own. Few of the modules are imported, so
  # they are compiled to bytecode when they are.
  pip() { "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }
  mapfile -t build < <("$python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
  pip "${build[@]}" "cmake>=3.24" ninja
  RWKV_JAX_NATIVE=${RWKV_JAX_NATIVE-ON} pip --no-build-isolation ".[$extras]"
fi

# The model of an earlier demo is replaced, unless this one goes on with it.
[[ " $* " == *" --resume "* ]] || set -- --force "$@"
"$python" scripts/train.py --size demo --prompt "def " --steps 300 --warmup 30 --eval-every 150 \
  --eval-tokens 32768 "$@" --out out/demo
# With -P the command is that of the installed package, not of the sources in this folder.
exec "$python" -P -m rwkv_jax generate out/demo/model.safetensors --prompt "def " \
  --presence 0 --frequency 0
