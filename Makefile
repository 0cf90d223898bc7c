# Two commands need nothing but Python 3.10+ and a network to install from: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

# Empty means that bytecode is kept: to compile the tests takes seconds, in several processes.
export PYTHONDONTWRITEBYTECODE :=

STAGES := lint types docs compiled tests alone

.PHONY: demo test test-triton $(STAGES) bench soak clean

demo: .venv/.demo
	$(BIN)/thinwire demo

# Every stage runs, whatever became of the others; the last line says which have failed. What is measured alone
# mostly waits for slow links, and what imports torch once for all tests has one core's work: the stages beside
# them use what they leave (`nice`).
test: .venv/.installed
	@rm -rf build/failed && mkdir -p build/failed
	@$(MAKE) --no-print-directory --jobs 3 try-alone try-types try-compiled
	@$(MAKE) --no-print-directory --jobs 3 try-tests try-docs try-lint
	@failed=$$(ls build/failed); test -z "$$failed" || { echo "FAILED:" $$failed; exit 1; }
	@echo "all passed:" $(STAGES)

try-%:
	@$(MAKE) --no-print-directory $* || touch build/failed/$*

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	nice -n 19 $(BIN)/mypy

docs: .venv/.installed
	rm -rf build/pages && mkdir -p build/pages
	cp -r README.md CHANGELOG.md CONTRIBUTING.md CITATION.cff LICENSE docs benchmarks examples build/pages
	NO_MKDOCS_2_WARNING=1 nice -n 19 $(BIN)/mkdocs build --strict --quiet

# Once, so that two workers of the tests do not compile the same at the same time.
compiled: build/.compiled
build/.compiled: .venv/.installed $(wildcard src/thinwire/algorithms/kernels/numba/*.py)
	nice -n 19 $(BIN)/python tests/preloaded.py
	@mkdir -p build && touch $@

tests: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not alone'

# Only files that have one: to import the others takes longer than some of these tests.
alone: .venv/.installed
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='*.py' 'mark\.alone' tests)

# Triton is a large wheel that only GPUs need: its kernels run here in its interpreter, and are compiled for GPUs.
test-triton: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev-triton]'
	$(BIN)/python -m pytest tests/triton_ready tests/gpu_ready

bench: .venv/.installed
	$(BIN)/python benchmarks/bench_codec.py
	$(BIN)/python benchmarks/bench_quality.py

soak: .venv/.installed
	$(BIN)/python tests/soak.py

.venv/.demo: EXTRA := cli
.venv/.installed: EXTRA := dev
.venv/.demo .venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRA)]'
	touch $@

clean:
	rm -rf .venv
