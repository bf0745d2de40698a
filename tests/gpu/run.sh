#!/usr/bin/env bash
# Proves and times everything that one GPU can prove: CUDA IPC, extraction, offload, digests, the search for changes, patches.
#
#   tests/gpu/run.sh                       on a machine with a GPU; under 8 minutes; no network is needed
#   tests/gpu/run.sh --device cpu          a dry run: the same code and small sizes, without a GPU
#   tests/gpu/run.sh --help                all options
#
# PYTHON   the interpreter: 3.11 or newer, with torch, numpy and numba.
# WHEELS   a folder of wheels for packages that this interpreter lacks (default: wheels/ in the checkout, if there is one).
#          The script names what is missing, and the command that fetches it on a machine with a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-wheels}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$PYTHONPATH:$site"
fi
"$PYTHON" -m tests.gpu.prove "$@"
