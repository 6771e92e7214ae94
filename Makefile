# `make demo` and `make test` are all there is to type: each makes .venv on first use, builds the extension
# and installs what it needs. A change of pyproject.toml, CMakeLists.txt or xla_ffi/ rebuilds; Python sources
# take effect at once (editable install).
#
#   PYTHON=python3.12 make test      another interpreter for .venv (3.11 to 3.13)
#   make test ARGS="-k dense -x"     arguments for pytest;   make demo ARGS="--steps 100"   for the demo

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON  ?= python3
ARGS    ?=
WORKERS ?= 2
NATIVE  := pyproject.toml CMakeLists.txt $(shell find xla_ffi -type f 2>/dev/null)

# The newest jax needs Python 3.12. Each candidate is run, since a name on PATH may be a shim with nothing behind it.
candidates = python3.12 $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.12*/bin/python3.12))
PYTHON312 ?= $(firstword $(foreach p,$(candidates),$(shell $(p) -c 'import sys; print(sys.executable)' 2>/dev/null)))

# $(call environment,FOLDER,PYTHON). The tests run the examples, so both extras are always wanted.
define environment
	$(2) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "jax_fp4 needs Python 3.11, 3.12 or 3.13, but '$(2)' is: $$($(2) --version 2>&1 || true)" >&2; \
	  echo "Name one that fits:  make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(1)/bin/pip || { echo "== $(1): creating it with $$($(2) --version)"; $(2) -m venv $(1); }
	echo "== $(1): installing jax_fp4 and compiling its CPU kernels (first time: one to three minutes)"
	SECONDS=0; $(1)/bin/pip install -q --disable-pip-version-check -e '.[examples,test]'; echo "== $(1): ready after $${SECONDS} s"
	touch $@
endef

.PHONY: help demo test lint format core core-run clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: .venv/.installed  ## train a small language model in bfloat16 and in NVFP4, three ways; writes out/loss.png
	@.venv/bin/python examples/train_lm.py --compare --out out $(ARGS)

test: .venv/.installed  ## run the tests
	@.venv/bin/pytest -n $(WORKERS) $(ARGS)

lint: .venv/.lint  ## ruff, pyright, clang-format: report only
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright --pythonpath .venv/bin/python
	@find xla_ffi tests/cpp -type f \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 \
	  | xargs -0 --no-run-if-empty .venv/bin/clang-format --dry-run -Werror

format: .venv/.lint  ## let ruff and clang-format rewrite the sources
	@.venv/bin/ruff check --fix-only -q .
	@.venv/bin/ruff format .
	@find xla_ffi tests/cpp -type f \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 \
	  | xargs -0 --no-run-if-empty .venv/bin/clang-format -i

core:  ## run the core tests on Python 3.12 with the newest jax
	@if [ -n "$(PYTHON312)" ]; then $(MAKE) --no-print-directory core-run; \
	else echo "== core tests on the newest jax: NOT RUN, no Python 3.12 was found (on PATH or under pyenv)"; fi

core-run: .venv-core/.installed
	@.venv-core/bin/python -c 'import jax, sys; print(f"== core tests: Python {sys.version.split()[0]}, jax {jax.__version__}")'
	@.venv-core/bin/pytest -n $(WORKERS) -m core $(ARGS)

clean:  ## remove all that make created: environments, builds, caches, results
	rm -rf .venv .venv-core build out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: $(NATIVE)
	@$(call environment,.venv,$(PYTHON))

.venv-core/.installed: $(NATIVE)
	@$(call environment,.venv-core,$(PYTHON312))

# The linters alone: installing the [dev] extra would build the extension once more.
.venv/.lint: .venv/.installed
	@echo "== .venv: installing the linters"
	@.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' \
	  | .venv/bin/pip install -q --disable-pip-version-check -r /dev/stdin
	@touch $@
