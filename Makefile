# Two commands need nothing but Python 3.10+ and a network to install from: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

# Keep bytecode: compiling the tests takes seconds in each process.
export PYTHONDONTWRITEBYTECODE :=

# Tests that need no framework, tool or demo.
CORE := tests/algorithms tests/kernels tests/comm tests/ddp_comm_hooks tests/adapters tests/hooks tests/sync tests/testing tests/watch \
	tests/test_all_gather.py tests/test_checkpoint.py tests/test_plan.py tests/test_powersgd.py
OTHER := .venv-torch-$(VERSION)-$(notdir $(PYTHON))

STAGES := types docs lint triton wheel
.PHONY: demo test check nightly proofs test-triton test-torch test-frameworks test-wheel $(STAGES) compiled figures bench soak elastic-faults clean

demo: .venv/.demo
	$(BIN)/thinwire demo

# Everything that a user's trust rests on.
test: compiled
	@echo "tests, in three processes (many wait for others):"
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not nightly and not alone" --ignore tests/triton_ready

# The source, the pages and the wheel. Every stage runs, even if one fails; the last line names the failed ones.
check: .venv/.installed
	@rm -rf build/failed && mkdir -p build/failed
	@$(MAKE) --no-print-directory --jobs 2 $(STAGES:%=try-%)
	@failed=$$(ls build/failed); test -z "$$failed" || { echo "FAILED:" $$failed; exit 1; }
	@echo "all passed:" $(STAGES)

try-%:
	@echo "$*:"
	@$(MAKE) --no-print-directory $* || touch build/failed/$*

# Long runs, and those that need a quiet machine. Other versions: make test-torch, test-frameworks, test-wheel.
nightly: compiled
	@echo "measurements, one at a time:"
	$(BIN)/python -m pytest -m alone --ignore tests/triton_ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "nightly and not alone" --ignore tests/triton_ready
	$(MAKE) test-triton
	$(MAKE) proofs
	$(MAKE) soak

# Real training commands with and without `thinwire attach`, the calculator in Chromium; what is not installed is skipped.
proofs: docs
	$(BIN)/python scripts/proofs/without_code.py
	$(BIN)/python scripts/proofs/calculator_page.py

lint: .venv/.installed
	nice -n 19 $(BIN)/ruff check .
	nice -n 19 $(BIN)/ruff format --check .

types: .venv/.installed
	nice -n 19 $(BIN)/mypy

docs: .venv/.installed
	rm -rf build/pages && mkdir -p build/pages
	cp -r README.md CHANGELOG.md CONTRIBUTING.md CITATION.cff LICENSE docs benchmarks examples build/pages
	NO_MKDOCS_2_WARNING=1 nice -n 19 $(BIN)/mkdocs build --strict --quiet
	@echo "the pages: $(CURDIR)/build/site/index.html"

# Compile once, so that two test workers do not compile the same code.
compiled: build/.compiled
build/.compiled: .venv/.installed $(wildcard src/thinwire/kernels/numba/*.py)
	@echo "compiling the kernels of CPUs, once:"
	$(BIN)/python tests/preloaded.py
	@mkdir -p build && touch $@

# In separate processes: Triton's interpreter stays off once a test has imported Triton without it. With the Triton
# of the environment, if there is one, and with those that `make test-triton` has put beside it.
triton: .venv/.installed
	@set -- $$(ls -d .venv/lib/*/site-packages/triton build/triton-*/triton 2>/dev/null); \
	test $$# -gt 0 || echo "NO TRITON HERE: none of its kernels was tested (make test-triton)"; \
	for each; do PYTHONPATH=$${each%/triton} nice -n 19 \
		$(BIN)/python -m pytest -m 'not long' tests/triton_ready || exit 1; done

# Torch 2.6 comes with the first of them; the last one's interpreter works with today's NumPy.
TRITONS := 3.2 3.6 3.9

# Only GPUs need Triton, a large wheel. Here its kernels run in its interpreter, and are compiled for GPUs.
test-triton: .venv/.installed $(TRITONS:%=build/triton-%)
	for each in build/triton-*/triton; do PYTHONPATH=$${each%/triton} \
		$(BIN)/python -m pytest tests/triton_ready || exit 1; done

build/triton-%: | .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ 'triton==$*.*' \
		|| { rm -rf $@; echo "NO TRITON $* HERE: it does not install"; }

# The core on a different torch, in a separate environment: make test-torch VERSION=2.6.0 PYTHON=python3.10
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python tests/preloaded.py
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal -m 'not alone and not nightly' $(CORE)

# No constraints: they are for one version of Python.
$(OTHER)/.installed: pyproject.toml
	$(if $(VERSION),,$(error say which torch: make test-torch VERSION=2.6.0))
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check 'torch==$(VERSION)' -e '.[test]'
	touch $@

# The oldest Accelerate and Transformers that the extras take, in a separate environment.
OLDEST := accelerate==1.6.0 transformers==4.51.3
test-frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/python -m pytest -n 2 --dist worksteal tests/integrations/test_accelerate.py \
		tests/integrations/test_transformers.py

.venv-frameworks/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/pip install --quiet --disable-pip-version-check -e '.[test,transformers]' $(OLDEST)
	touch $@

# Build the sdist and the wheel, and try them beside nothing but torch.
CONSTRAINTS := -c constraints.txt
RELEASE := build/release
BARE := nice -n 19 $(RELEASE)/bare/bin
wheel:
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/builder
	$(RELEASE)/builder/bin/pip install --quiet --disable-pip-version-check 'hatchling>=1.27'
	$(RELEASE)/builder/bin/hatchling build --target sdist --directory $(RELEASE)
	$(RELEASE)/builder/bin/pip wheel --quiet --disable-pip-version-check --no-deps -w $(RELEASE) $(RELEASE)/*.tar.gz
	$(PYTHON) -m venv $(RELEASE)/bare
	$(BARE)/pip install --quiet --disable-pip-version-check $(CONSTRAINTS) $(RELEASE)/*.whl
	$(BARE)/python -I scripts/released.py $(RELEASE)/*.tar.gz $(RELEASE)/*.whl
	OMP_NUM_THREADS=1 $(BARE)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 examples/plain_ddp.py

# With the command line, too. On a different Python, whose packages have other versions:
# make test-wheel PYTHON=python3.13 CONSTRAINTS=
test-wheel: wheel
	$(BARE)/pip install --quiet --disable-pip-version-check $(CONSTRAINTS) "$$(ls $(RELEASE)/*.whl)[cli]"
	$(BARE)/thinwire --help
	$(BARE)/thinwire demo --model-size tiny --steps 5 --output $(RELEASE)/demo

# How large the code is, what makes it hard to read (with the places: add `--list`), and what a step runs (with the
# functions: add `--show`).
figures: .venv/.installed
	$(BIN)/python scripts/house_figures.py
	$(BIN)/python scripts/trace_step.py

bench: .venv/.installed
	$(BIN)/python benchmarks/bench_codec.py
	$(BIN)/python benchmarks/bench_quality.py

# The soaks start the tests' processes.
SOAK := PYTHONPATH=tests $(BIN)/python scripts/soak
soak: .venv/.installed
	$(SOAK)/soak.py
	$(SOAK)/resident.py

# Real members and a real lighthouse; takes two or three hours. Cutting the link needs root or user namespaces. A
# soak in build/elastic-soaks.jsonl is not repeated.
elastic-faults: .venv/.installed
	$(SOAK)/loss_in_turns.py
	$(SOAK)/elastic_faults.py
	$(SOAK)/elastic_faults.py --peer
	for inside in ddp fsdp; do $(SOAK)/elastic_faults.py --members --inside $$inside || exit 1; done
	$(SOAK)/identity_in_turns.py
	for peer in "" --peer; do $(SOAK)/kills.py $$peer || exit 1; done
	$(SOAK)/unequal.py

.venv/.demo: EXTRA := cli
.venv/.installed: EXTRA := dev
.venv/.demo .venv/.installed: pyproject.toml constraints.txt
	@echo "installing thinwire[$(EXTRA)] into .venv:"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRA)]'
	touch $@

clean:
	rm -rf .venv .venv-torch-* .venv-frameworks build
