# Two commands, each enough on a bare machine with gcc, make and a Python >= 3.12:
#   make example    train a small long-context model with split-KV attention
#   make test       everything CI runs
# Others: build (in place, incremental), lint, format, clean.
# Variables: PYTHON=/path/to/python3.12   PYTEST_ARGS="tests/plan -k blocks"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.ONESHELL:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

export PATH := $(CURDIR)/.venv/bin:$(PATH)
PYTEST_ARGS ?=
# A hang ends: each test has its own limit (pyproject.toml), the whole run this one. Without a
# terminal the processes that the tests started end with it.
PYTEST_LIMIT_S ?= 1500

CPP_FILES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
CUDA_SOURCES := $(shell find csrc -name '*.cu')
CUDA_OBJECTS := $(CUDA_SOURCES:%.cu=build/cuda/%.o)
# As in CMakeLists.txt, but for the PTX.
GENCODE_SM90 := -gencode=arch=compute_90a,code=sm_90a
GENCODE_SM80 := -gencode=arch=compute_80,code=sm_80
INSTALLED := .venv/installed

.PHONY: example test build venv lint format isa cuda clean

example: build
	bash examples/long_context_gpt.sh

# Several processes share few cores in the tests: two threads each, and none spins while it waits.
test: export OMP_NUM_THREADS ?= 2
test: export OMP_WAIT_POLICY ?= passive
test: build lint isa cuda
	timeout --verbose $(if $(CI),,--foreground) --kill-after=30 $(PYTEST_LIMIT_S) \
	    python -m pytest $(PYTEST_ARGS)

venv:
	tools/make_venv.sh

# The editable install puts the package on the path once; after it only the native modules change.
build: venv
	@python setup.py --quiet build_ext --inplace
	if [[ ! -f $(INSTALLED) || pyproject.toml -nt $(INSTALLED) ]]; then
	    python -m pip install --quiet --no-input --no-deps --no-build-isolation --editable .
	    touch $(INSTALLED)
	fi

lint: venv
	ruff format --check .
	ruff check .
	pyright
	clang-format --dry-run -Werror $(CPP_FILES)
	python tools/check_files.py

format: venv
	ruff format .
	ruff check --fix .
	clang-format -i $(CPP_FILES)

# What one of these files defines must stay its own: the linker may take a weak symbol, such as an
# inline function, for the whole module, and then a plain CPU runs into AVX code.
isa: build
	@if nm --demangle build/inplace/CMakeFiles/_kernels.dir/csrc/cpu/isa_*.o | grep ' [WVu] '; then
	    echo "error: csrc/cpu/isa_*.cpp must define no weak symbol; make it static" >&2
	    exit 1
	fi

# Compiles the CUDA sources where nvcc is, with or without a GPU, and reads what ptxas says of them.
ifeq ($(CUDA_SOURCES),)
cuda:
	@echo "cuda: no CUDA sources"
else ifeq ($(shell command -v nvcc),)
cuda:
	@echo "cuda: NOT CHECKED, there is no nvcc on this machine"
else
cuda: venv $(CUDA_OBJECTS)
	@python tools/check_ptxas.py $(CUDA_OBJECTS:.o=.log)
endif

build/cuda/%.o: GENCODE = $(GENCODE_SM80) $(GENCODE_SM90)
build/cuda/csrc/cuda/sm80/%.o: GENCODE = $(GENCODE_SM80)
build/cuda/csrc/cuda/sm90/%.o: GENCODE = $(GENCODE_SM90)
build/cuda/%.o: %.cu
	mkdir -p $(@D)
	log=$(@:.o=.log)
	nvcc -std=c++17 -O3 $(GENCODE) -Icsrc -Xptxas -v -MMD -MP -c $< -o $@ \
	    >$$log 2>&1 || { cat $$log; exit 1; }

-include $(CUDA_OBJECTS:.o=.d)

clean:
	rm -rf build megatron_splitkv/*.so *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
