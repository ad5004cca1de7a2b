# The commands of replay_sim; each makes the environment that it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.PHONY: env test long-run coverage mutants sanitize explore lab notebooks clean

env: $(STAMP)

$(STAMP): environment.yml pyproject.toml
	$(PYTHON) -m venv .venv
	sed -n 's/^      - \([A-Za-z0-9._-]*==[^ ]*\).*$$/\1/p' environment.yml > .venv/requirements.txt
	$(BIN)/pip install -r .venv/requirements.txt
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	touch $@

test: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile
ifneq ($(NOTEBOOKS),)
	$(BIN)/pytest -n 2 --dist loadfile --nbval-lax --nbval-cell-timeout=300 notebooks
endif

STEPS ?= 100000
SEED ?= 1000
WORKERS ?= 2
DEVICE ?= cpu
long-run: env
	PYTHONPATH=.:tests $(BIN)/python -m long_run --steps $(STEPS) --seed $(SEED) --workers $(WORKERS) --device $(DEVICE)

# The rooms that decide what is captured and replayed. Left out: what only a GPU runs.
ROOMS := plan batch capture replay
COVERED_BY := $(ROOMS:%=tests/%) tests/faults tests/commands/test_check.py tests/commands/test_plan.py \
  tests/decoder/test_one_launch.py tests/decoder/test_pads_alone.py tests/decoder/test_pool_prediction.py
coverage: env
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(COVERED_BY)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Each of so many changes of the same rooms must make some test fail.
MUTANTS ?= 400
mutants: env
	PYTHONPATH=.:tests $(BIN)/python -m mutants --sample $(MUTANTS) --workers $(WORKERS)

# On a machine with a GPU and compute-sanitizer; no cache, so that memory begins and ends where a tensor does.
KERNEL_TESTS := tests/replay/test_row_kernels.py tests/batch/test_rows_kernel.py $(wildcard tests/decoder/test_kernels_*.py)
# initcheck without the one test of the framework's own grouped product, which reads memory that nothing wrote.
NOT_OURS := tests/decoder/test_kernels_experts.py::test_a_grouped_product_of_whole_16_bytes_skips_experts_of_no_rows
sanitize: env
	for tool in memcheck racecheck initcheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 9 $(BIN)/python -m pytest -q -m sanitizer \
	    $(KERNEL_TESTS) $$([ $$tool != initcheck ] || echo --deselect $(NOT_OURS)) || exit 1; done

explore: env
	$(BIN)/python -m replay_sim.explore

lab: env
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/01_tour_of_one_step.ipynb notebooks

notebooks: env
	$(BIN)/python -m replay_sim.explore.notebooks $(NOTEBOOKS)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
