# Two commands matter: `make nightly` and `make test`. Both set up everything they need in .venv.
# MLX=cuda chooses MLX's CUDA build on Linux; on macOS the same lock brings Metal.

MLX ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := $(if $(filter cuda,$(MLX)),requirements-cuda.lock,requirements.lock)
STAMP := $(VENV)/.installed-$(MLX)
UV := $(BIN)/python -m uv

.PHONY: nightly test test-fast up down check format lock setup blas clean

nightly: setup
	$(BIN)/kivi nightly

# As many processes as cores, each with one thread for products; tests that share a server or a store run in the same one.
test test-fast: export OPENBLAS_NUM_THREADS := 1
test: check
	$(BIN)/python -m pytest -n auto --dist loadgroup

# For the hand: no servers, no real model, no terminal.
test-fast: setup
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" -q

# Prefect, MLflow and a worker in the background, with the deployments of prefect.yaml. docs/operations.md says more.
up: setup
	@$(BIN)/python -m flows.servers up

down:
	@$(BIN)/python -m flows.servers down

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: blas $(STAMP)

$(STAMP): $(LOCK) pyproject.toml flows/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"kivi needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	$(UV) pip install --quiet --python $(BIN)/python --compile-bytecode --no-deps --require-hashes -r $(LOCK)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable . --editable ./flows
	@rm -f $(VENV)/.installed-* && touch $@

# MLX's Linux wheels link the reference BLAS; a system OpenBLAS makes prefill 40 times faster. Without it all works, slowly.
blas:
	@if [ "$$(uname -s)" = Linux ] && ! ldconfig -p | grep -q libopenblas.so.0; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing libopenblas0-pthread"; \
	    { apt-get update -qq && apt-get install -y -qq libopenblas0-pthread; } >/dev/null 2>&1 || echo "OpenBLAS could not be installed: prefill will be slow"; \
	  else echo "OpenBLAS is missing, prefill will be slow: apt-get install libopenblas0-pthread"; fi; fi

lock: setup
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --extra cpu --extra embedded --group dev pyproject.toml flows/pyproject.toml -o requirements.lock
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --extra cuda --extra embedded --group dev pyproject.toml flows/pyproject.toml -o requirements-cuda.lock

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
