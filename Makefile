# Two commands need nothing but Python 3.10+ and a network to install from: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types docs bench soak clean

demo: .venv/.demo
	$(BIN)/thinwire demo

test: .venv/.installed
	$(MAKE) --jobs 2 lint types docs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not alone'
	$(BIN)/python -m pytest -m alone

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

docs: .venv/.installed
	rm -rf build/pages && mkdir -p build/pages
	cp -r README.md docs benchmarks examples build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

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
