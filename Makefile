# Two commands: `make walkthrough` and `make test`. Each sets itself up on a machine with Python >= 3.10, git and make.
#
#   make walkthrough [RUNG=sim|flashmla|vllm] [PROMPT=file.txt] [ONLY=01,02] [SM_COUNT=78] [FLASHMLA_LIB=path]
#   make test
#   make gpu-env [VLLM=0.20.2]   sets up what the GPU rungs need, as they do themselves on their first run
#   make releases     reads builder sources out of vLLM wheels that it downloads, and runs them on the simulator

PYTHON ?= python3
RUNG ?= sim
VLLM ?= 0.20.2
NOTEBOOK_ARGS := --rung $(RUNG) $(if $(PROMPT),--prompt-file "$(PROMPT)") $(if $(ONLY),--only "$(ONLY)") \
	$(if $(SM_COUNT),--sm-count "$(SM_COUNT)") $(if $(FLASHMLA_LIB),--flashmla-lib "$(FLASHMLA_LIB)")

# On the CPU torch is pinned. A GPU rung has an environment of its own, in which torch is left to vLLM and all is locked;
# on a machine with no NVIDIA driver it is not made, and the command itself says what is missing.
ifeq ($(and $(filter flashmla vllm,$(RUNG)),$(shell command -v nvidia-smi)),)
VENV := .venv
STAMP := $(VENV)/.installed
INSTALL := -c constraints-cpu.txt -e '.[notebooks,test]'
else
VENV := .venv-gpu
STAMP := $(VENV)/.installed-vllm-$(VLLM)
INSTALL := -r repro/locks/vllm-$(VLLM).txt -e '.[notebooks,test,gpu]'
endif
BIN := $(VENV)/bin

.PHONY: walkthrough test releases gpu-env clean
walkthrough: $(STAMP)
	@$(BIN)/stalegraph walkthrough $(NOTEBOOK_ARGS)

test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

releases: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m releases

gpu-env:
	@command -v nvidia-smi >/dev/null || { echo "gpu-env needs an NVIDIA driver; nvidia-smi is not found" >&2; exit 2; }
	@$(MAKE) --no-print-directory RUNG=flashmla VLLM=$(VLLM) .venv-gpu/.installed-vllm-$(VLLM)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "stalegraph needs Python 3.10 or newer, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(INSTALL)
	@rm -f $(VENV)/.installed*
	@touch $@

clean:
	rm -rf build .venv .venv-gpu
