# Everything a developer or CI runs. `make venv` needs nothing but python3.11 or newer.
PYTHON ?= python3
# The GPU targets run without .venv: such machines bring their own torch, built for their driver.
GPU_PYTHON ?= python3
BIN := .venv/bin

# Tests start deltachain hundreds of times: each start would compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: docs package soak chaos test-floors test-triton test-browser bench-browser
.PHONY: prometheus venv-sky venv-openenv venv-trainers venv-trl venv-verl venv-rl venv-ray venv demo demo-async examples test test-all test-rest test-long check fix bench venv-vllm test-vllm test-vllm-long test-gpu bench-gpu
.PHONY: test-dist test-dist-long test-frameworks test-peers bench-dist cross-region bench-vllm bench-attach venv-sglang test-sglang test-sglang-long test-engine-versions test-modes bench-sglang clean help

venv: .venv/stamp  ## build .venv, or bring it up to date with pyproject.toml

# torch first, pinned and by pip: everybody tests on the same one, and pip takes a build that lies on the machine.
# uv resolves the rest around it, in seconds where pip needs two minutes. The CPU build of torch brings no
# triton; ours interprets and compiles the GPU programs in tests, for which Linux on x86-64 needs no card.
.venv/stamp: pyproject.toml
	$(PYTHON) -m venv .venv && $(BIN)/pip install -q torch==2.13.0 uv
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install -q --no-deps triton==3.9.0
	$(BIN)/uv pip install -q -p .venv -e ".[all]" --group dev && touch $@

demo: venv  ## train, publish and follow a small model in one terminal
	$(BIN)/python -m examples.demo

# ENGINE=sglang for the other one; DASHBOARD=1 shows the run on a web page, whose address is printed.
ENGINE ?= vllm
demo-async: venv venv-$(ENGINE)  ## asynchronous GRPO with a real engine and a real S3 server
	$(BIN)/python -m examples.demo.online --engine $(ENGINE) $(if $(DASHBOARD),--dashboard) $(DEMO)

examples: venv venv-vllm venv-sglang  ## run examples 01 to 09, with a small model
	$(BIN)/pytest -m slow tests/e2e/test_examples.py
	$(BIN)/jupyter-execute examples/08_delta.ipynb

# More processes than cores: most tests wait for a server or a child. Each has servers of its own.
test: venv  ## the quick tests, before each push: four minutes on two cores
	$(BIN)/pytest --quick -n 3 --dist worksteal

test-all: test test-rest  ## the tests that need no GPU and no engine

test-rest: venv
	$(BIN)/pytest --rest -n 4 --dist worksteal

test-long: venv venv-vllm venv-sglang venv-verl  ## the tests that take minutes, each example among them
	$(BIN)/pytest -m "slow and not gpu and not engine and not dist and not package"
	$(BIN)/jupyter-execute examples/08_delta.ipynb

# Minutes of all runs count: started again, it goes on. MINUTES=10 for a look.
MINUTES ?= 120
soak: venv  ## publish, maintain, mirror and follow for two hours; memory and open files must not grow
	$(BIN)/python -m tests.crash.soak --minutes $(MINUTES)

# Minutes of all runs count here too. SEED=2 for other accidents; everything is kept in the folder chaos.
SEED ?= 1
chaos: venv venv-vllm venv-sglang  ## two hours of accidents to a trainer, an S3 server and two real engines
	$(BIN)/python -m tests.crash.chaos --minutes $(MINUTES) --seed $(SEED)

test-dist: venv  ## trainers of several ranks
	$(BIN)/pytest tests/ranks -m "dist and not slow"

test-dist-long: venv  ## ranks that are killed at every stage of a publish
	$(BIN)/pytest tests/ranks -m "dist and slow"

# Elsewhere a test without its environment is skipped; here it fails.
test-frameworks: venv venv-vllm venv-sglang venv-sky venv-openenv venv-trainers venv-trl venv-verl venv-rl venv-ray  ## each test with the real package of a framework: half an hour
	$(BIN)/pytest -m "venv and not engine"
	.venv-vllm/bin/pytest tests/engines -m "venv and engine"
	.venv-sglang/bin/pytest tests/engines -m "venv and engine"

check: venv  ## format, lint, spelling, types, layers, size
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/codespell
	$(BIN)/mypy && $(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.size

fix: venv  ## repair what ruff can, and make what documents show of the code anew
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/python -m docs.generated

docs: venv  ## build the documentation site into site/; a broken link or a missing docstring fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: venv  ## build sdist and wheel into dist/, and check what is in them
	rm -rf dist && $(BIN)/pyproject-build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest -m package tests/package

# Not in CI: torch of the lowest version is another download of gigabytes. Old releases on newer ones of
# what they need may warn; that is not ours. tests/unit/support holds the emulated Hub against a client of today.
test-floors: venv  ## the unit tests, on the lowest versions that pyproject.toml promises
	$(BIN)/uv venv -q --clear -p $(BIN)/python .venv-floors
	$(BIN)/uv pip install -q -p .venv-floors --resolution lowest-direct -e ".[all]" --group test
	.venv-floors/bin/pytest tests/unit --ignore tests/unit/support -o filterwarnings=default

bench: venv  ## speed and size on this CPU
	$(BIN)/python -m tests.bench codec
	$(BIN)/python -m tests.bench detect
	$(BIN)/python -m tests.bench apply
	$(BIN)/python -m tests.bench anchor

# Debian's, unpacked without being installed: promtool reads the alert rules.
PROMETHEUS := $(HOME)/.cache/deltachain/prometheus
prometheus: $(PROMETHEUS)/usr/bin/promtool  ## Debian's prometheus and promtool, for the tests of the alert rules
$(PROMETHEUS)/usr/bin/promtool:
	mkdir -p $(PROMETHEUS)
	cd $(PROMETHEUS) && (apt-get -q download prometheus || (apt-get -q update && apt-get -q download prometheus)) && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

venv-sky: venv  ## build .venv-sky, with SkyPilot, whose pins exclude ours: it reads its recipes
	test -x .venv-sky/bin/sky || $(BIN)/uv venv -q .venv-sky
	$(BIN)/uv pip install -q -p .venv-sky "skypilot>=0.14"

venv-openenv: venv  ## build .venv-openenv, with the client of OpenEnv, which brings gradio: it plays the game
	test -x .venv-openenv/bin/python || $(BIN)/uv venv -q -p $(BIN)/python .venv-openenv
	$(BIN)/uv pip install -q -p .venv-openenv "openenv-core>=0.3,<0.4"

# DeepSpeed builds from source, by the torch that is there.
venv-trainers: venv  ## build .venv-trainers, with DeepSpeed and megatron-core, which tests run on CPUs
	test -x .venv-trainers/bin/pip || $(BIN)/python -m venv .venv-trainers
	.venv-trainers/bin/pip install -q torch==2.13.0
	$(BIN)/uv pip install -q -p .venv-trainers -e ".[trl]" pytest setuptools py-cpuinfo psutil ninja mbridge==0.15.1 megatron-core==0.16.1
	DS_BUILD_OPS=0 $(BIN)/uv pip install -q -p .venv-trainers --no-build-isolation deepspeed==0.19.8

venv-trl: venv  ## earlier releases of TRL, without what they need, in .venv-trl
	for v in 1.13.0 1.14.2 1.15.0; do $(BIN)/uv pip install -q --no-deps --target .venv-trl/$$v trl==$$v; done

# RLinf without what it needs beside its workers: wandb, gsutil and others.
venv-verl: venv  ## build .venv-verl, with verl, RLinf and Megatron: their workers train and take weights
	test -x .venv-verl/bin/python || $(BIN)/uv venv -q -p $(BIN)/python --seed .venv-verl
	.venv-verl/bin/pip install -q torch==2.13.0  # by pip, as .venv
	$(BIN)/uv pip install -q -p .venv-verl -e . verl==0.9.1 torch==2.13.0 fastapi pyzmq uvicorn mbridge==0.15.1 megatron-core==0.16.1 einops pytest
	$(BIN)/uv pip install -q -p .venv-verl --no-deps rlinf==0.3.0

# SkyRL's wheel asks for Python 3.12, and of it needs typing.TypedDict alone.
RL := .venv-rl/lib/python3.11/site-packages
venv-rl: venv venv-vllm  ## build .venv-rl, with SkyRL, AReaL, RLinf, ModelExpress and Ray over vLLM's packages: trainers that servers follow
	test -x .venv-rl/bin/pip || .venv-vllm/bin/python -m venv .venv-rl
	echo "import site; site.addsitedir('$(CURDIR)/.venv-vllm/lib/python3.11/site-packages')" > $(RL)/vllm.pth
	echo "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict" > $(RL)/typed.pth
	.venv-rl/bin/pip install -q --no-deps --ignore-requires-python skyrl==0.4.0 skyrl-gym==0.4.0 areal==1.0.4 peft==0.18.1 tensordict==0.15.3 pyvers==0.2.3 torchdata==0.11.0 vllm-router==0.1.17 rlinf==0.3.0 modelexpress==0.7.0
	$(BIN)/uv pip install -q -p .venv-rl ray==2.60.0 aiofiles blosc cloudpathlib colorlog datasets distro-info flask func_timeout google-crc32c httpx hydra-core jaxtyping math-verify matplotlib ninja nltk omegaconf orjson pandas pebble polars prettytable pybase64 pylatexenc redis s3fs setproctitle swanlab tabulate tenacity tensorboard tensorboardx trackio uvloop wandb

RAY := .venv-ray/lib/python3.11/site-packages
venv-ray: venv venv-sglang  ## build .venv-ray, with Ray over SGLang's packages
	test -x .venv-ray/bin/python || .venv-sglang/bin/python -m venv --without-pip .venv-ray
	echo "import site; site.addsitedir('$(CURDIR)/.venv-sglang/lib/python3.11/site-packages')" > $(RAY)/sglang.pth
	$(BIN)/uv pip install -q -p .venv-ray --no-deps ray==2.60.0 msgpack protobuf tensorboardx

venv-vllm:  ## build .venv-vllm, with a real vLLM for CPUs; its packages are shared among clones
	$(PYTHON) tests/engines/build_venv.py vllm

venv-sglang:  ## the same for SGLang: .venv-sglang
	$(PYTHON) tests/engines/build_venv.py sglang

test-vllm: venv-vllm  ## the tests in a real vLLM
	.venv-vllm/bin/pytest tests/engines -m "engine and not slow" -n 2 --dist loadfile

test-vllm-long: venv-vllm venv-verl venv-rl  ## those of them that take minutes
	.venv-vllm/bin/pytest tests/engines -m "engine and slow"

# TRL's drafts and slime are no packages: PEERS=/mnt/peers for a folder that has their sources already.
PEERS ?= .peers
test-peers: venv-rl  ## bridges and weight syncers against those systems' own code, a real vLLM among them: 20 minutes
	PEERS=$(PEERS) .venv-rl/bin/python -m tests.peers.sources
	PEERS=$(PEERS) PATH="$(CURDIR)/$(BIN):$$PATH" .venv-rl/bin/python -m pytest tests/peers -m peers -o filterwarnings=default

test-sglang: venv-sglang  ## the tests in a real SGLang
	.venv-sglang/bin/pytest tests/engines -m "engine and not slow" -n 2 --dist loadfile

test-sglang-long: venv-sglang venv-verl venv-ray  ## those of them that take minutes
	.venv-sglang/bin/pytest tests/engines -m "engine and slow"

bench-vllm: venv-vllm  ## what an update costs a real vLLM, beside floors and peers: 20 minutes, 8 GB
	.venv-vllm/bin/python -m tests.engines.bench

bench-attach: venv-vllm  ## what it costs a real vLLM to attach, searched and with a kept proof: three minutes
	.venv-vllm/bin/python -m tests.engines.bench.attaching

cross-region: venv  ## what a deployment over regions costs: Linux, as root, six minutes
	$(BIN)/python -m tests.bench.cross_region

bench-dist: venv  ## what publishing costs the ranks of a sharded trainer
	$(BIN)/python -m tests.ranks.bench

bench-sglang: venv-sglang  ## the same for SGLang: ten minutes
	.venv-sglang/bin/python -m tests.engines.bench

# Not in CI: each release takes minutes and half a gigabyte. What it needs beside the pins is in build_venv.py.
VERSION ?= $(if $(filter vllm,$(ENGINE)),0.31.0,0.5.22)
test-engine-versions:  ## versions under load in another release: ENGINE=sglang, VERSION=0.5.22
	$(PYTHON) tests/engines/build_venv.py $(ENGINE)-$(VERSION)
	.venv-$(ENGINE)-$(VERSION)/bin/pytest tests/engines/test_server_load.py -m "engine and not slow"

# Not in CI: two starts of a server a row. Rows that were run are kept in the folder modes.
test-modes:  ## each mode of an engine, followed and killed, as the table of its README: ENGINE=sglang
	$(MAKE) venv-$(ENGINE)
	.venv-$(ENGINE)/bin/python -m tests.engines.modes --write

test-triton: venv  ## Triton programs without a card: interpreted, and compiled for three architectures
	$(BIN)/pytest -m triton tests/unit/test_staging_programs.py tests/unit/test_kernels.py

# Not in CI: Chromium is a package of the system. Debian: apt-get install chromium
test-browser: venv  ## the dashboard in Chromium, which must be installed
	$(BIN)/pytest -m browser tests/e2e

bench-browser: venv  ## the dashboard of 10,000 versions and 200 replicas in Chromium, beside a floor: three minutes
	$(BIN)/python -m tests.e2e.bench

test-gpu:  ## the GPU tests, with the system's python3 and torch
	PYTHONPATH=. $(GPU_PYTHON) -m tests.gpu.run test

# ONLY=end-to-end for one of them; DIVISOR=8 for smaller models, by default as large as fits.
bench-gpu:  ## the GPU benchmarks, with the system's python3 and torch
	PYTHONPATH=. $(GPU_PYTHON) -m tests.gpu.run bench $(ONLY) $(DIVISOR)

clean:  ## remove .venv, .venv-vllm, builds and caches
	rm -rf .venv .venv-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
