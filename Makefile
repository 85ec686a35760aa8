# make chat   sets everything up, fetches a small real model and opens the chat on it; from the second time on at once, offline
# make test   lint, types and tests, as .ci/run does
# make sanitize   the C kernels under AddressSanitizer and UBSan
# make bench-peer LLAMA=sources IK=sources FILES='a.gguf b.gguf'   builds llama.cpp and ik_llama.cpp, or one, and runs them beside the CPU executor
# Needs Python 3.11 or newer (PYTHON=... for one that is not called python3) and nothing else.

PYTHON ?= python3
MODEL ?= smollm2:135m
PIP = .venv/bin/python -m pip --disable-pip-version-check --quiet

chat: .venv/.installed
	@.venv/bin/tinychat $(MODEL)

# The tests start hundreds of processes: from bytecode, whatever the environment says of writing it.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/.installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pytest -n 2 --dist worksteal

# Up to date unless what tinychat depends on has changed: the code itself is used from where it is.
.venv/.installed: pyproject.toml | .venv/bin/pip
	@echo "installing tinychat and what it needs into .venv (once, about a minute)"
	@$(PIP) install --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/pip
	@echo "installing tinychat and its tools into .venv (once, about a minute)"
	@$(PIP) install --editable '.[dev]'
	@touch .venv/.installed $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/it")'
	@$(PYTHON) -m venv .venv

# The C kernels under AddressSanitizer and UBSan in every test that runs them; CLANG with its compiler-rt is needed.
CLANG ?= clang
sanitize: .venv/.installed-dev
	LD_PRELOAD=$$($(CLANG) -print-file-name=libclang_rt.asan-$$(uname -m).so) \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	.venv/bin/pytest -n 2 --capture=sys --sanitize $(CLANG) tests/kernels/cpu tests/kernels/test_exactness.py tests/kernels/test_random_shapes.py \
	    tests/kernels/test_sampling.py tests/kernels/test_verify.py tests/kernels/test_mtp.py tests/engine tests/measure/test_profile.py -k "$(SANITIZED)"
# Not: other compilers and instruction sets, memory and time limits that the sanitizers' own memory breaks, plain tinygrad, the GPU.
SANITIZED = not portable and not too_little_memory and not foretold and not hostile and not damaged and not devices and not linear_time and not reference

bench-peer: .venv/.installed
	.venv/bin/python -m scripts.bench_peer $(if $(LLAMA),--llama $(LLAMA)) $(if $(IK),--ik $(IK)) $(FILES)

.PHONY: chat test sanitize bench-peer
