#!/bin/sh
# Starts a real SGLang server on a CPU, from the environment that `make engines-sglang` makes. Further options are SGLang's
# own. As `serve.sh --starter` it starts servers for the tests, see starter.py; their options come with each order.
root=$(cd "$(dirname "$0")/../../.." && pwd)
python="${WEIGHTSYNC_SGLANG_PYTHON:-$root/.venv-sglang/bin/python}"
# the two stand-ins for CUDA packages, and this library, whose loader SGLang's workers import
export PYTHONPATH="$root/tests/engines/sglang_cpu:$root/src"
export SGLANG_USE_CPU_ENGINE=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
options="--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --disable-cuda-graph
  --skip-tokenizer-init --max-total-tokens 2048 --max-running-requests 4 --context-length 512 --mem-fraction-static 0.2
  --disable-overlap-schedule --skip-server-warmup --sleep-on-idle"
if [ "$1" = --starter ]; then
  exec "$python" "$root/tests/engines/sglang_cpu/starter.py" $options
fi
exec "$python" -m sglang.launch_server $options "$@"
