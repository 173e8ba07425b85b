# Everything runs in one .venv at the root; a target makes what it needs. `make test TORCH=2.14.1` and the like run
# in an environment of their own with PyPI's very file of that torch, a build for CUDA (6 GB).
PYTHON ?= python3
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OTHERS := .venv-frameworks$(TORCH:%=-torch-%)/bin
FRAMEWORKS := $(OTHERS)/python -m pip install -qq $(if $(TORCH),torch===$(TORCH),--constraint constraints.txt)

.PHONY: install demo test suite quick check lint network frameworks newest fuzz bench docs site lock audit package oldest pythons release clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshwise needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about two minutes, 2 GB with torch"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[all]' \
		$(if $(TORCH),torch===$(TORCH),--constraint constraints.txt)
	touch $(STAMP)

DEMO := llama3-70b --cluster h100-80g-sxm:64 --batch 128 --seq 8192
FASTEST := tp=2,cp=2,cp_kind=all_gather,zero=3

demo: install  # four commands, about ten seconds once installed
	@echo "1/4  What does a step of Llama 3 70B on 64 H100 cost, cut by tp=8,pp=2?"
	@$(BIN)/meshwise estimate $(DEMO) --plan tp=8,pp=2 | sed '/^Time/,$$d'
	@echo; echo "2/4  Which plan is the fastest that fits?"
	@$(BIN)/meshwise search $(DEMO) --top 3
	@echo "3/4  What does a run of a trillion tokens cost with it, at 2 dollars a GPU-hour?"
	@$(BIN)/meshwise estimate $(DEMO) --plan $(FASTEST) --tokens 1T --price 2 | sed -n '/^1 T/,/^cost/p'
	@echo; echo "4/4  Where does the time go? A picture: out/step.png"
	@mkdir -p out && $(BIN)/meshwise estimate $(DEMO) --plan $(FASTEST) --plot out/step.png > out/step.txt
	@echo; echo "Next:  source .venv/bin/activate"
	@echo "       meshwise web                     the same in the browser"
	@echo "       meshwise run ulysses --ranks 4   a real torch program on four processes"
	@echo "       meshwise --help                  all verbs; docs/index.md is next"

check: lint
	$(BIN)/pytest tests/test_house.py tests/test_public.py tests/test_docs.py

lint: install
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

quick: install  # all tests that are not marked as slow, for daily work: about a minute on two cores
	$(BIN)/pytest -n 2 -m "not slow" --ignore tests/test_network.py

test: install  # BESIDE: what two cores have time for beside the suite, as CI does
	$(MAKE) -j 2 lint network
	$(MAKE) -j 2 suite $(BESIDE)

suite: install  # a file stays on one worker, which makes its ranks once; conftest.py puts the longest first
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/test_network.py

network: install  # measures time, which ranks that mostly wait for a slow cable can do beside lint and types
	$(BIN)/pytest tests/test_network.py

$(OTHERS)/.installed: pyproject.toml constraints.txt
	test -x $(OTHERS)/python || $(PYTHON) -m venv $(OTHERS:%/bin=%)
	$(FRAMEWORKS) setuptools hatchling editables --editable '.[torch,dev]'
	$(FRAMEWORKS) --no-build-isolation --editable '.[frameworks]'  # deepspeed asks torch when it is built
	touch $@

frameworks: $(OTHERS)/.installed  # the packages of others, in a .venv of their own, and the tests that need them; TORCH= as above
	$(OTHERS)/pytest -n 2 tests/test_frameworks.py tests/test_transformers.py

NEWEST := torch>2.13,<=2.15.0
newest:  # what runs in the environments of others, with the newest torch of these that pip finds (6 GB, gone afterwards)
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -qq --no-cache-dir '$(NEWEST)' --editable '.[torch,dev]'
	.venv-newest/bin/python -c 'import torch; print("torch", torch.__version__)'
	.venv-newest/bin/pytest -n 2 --dist loadfile -k "not real_ranks and not sleeper and not stopped and not one_card and not older and not without_meshwise and not two_hosts" \
		tests/test_torch_private.py tests/test_script.py tests/test_profile.py tests/test_dry_run.py
	rm -rf .venv-newest

fuzz: install  # make fuzz CASES=20000 SEED=1: so many hostile inputs for each kind of input
	CASES=$(or $(CASES),1000) $(BIN)/pytest tests/test_fuzz.py --hypothesis-seed=$(or $(SEED),0)

bench: install
	$(BIN)/python -m benchmarks

docs: install
	set -e; for figures in docs/figures/*.py; do PYTHONPATH=. $(BIN)/python $$figures; done
	$(BIN)/python docs/rerun.py README.md docs/*.md docs/*/*.md

site: install  # the pages as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lock: install  # the versions that the tests ran with, and the hashes of their files
	$(BIN)/python -m pip install -qq uv
	$(BIN)/python -m pip freeze --exclude-editable | sed -n '/^uv==/d; s/+cpu$$//; /==/p' | $(BIN)/uv pip compile \
		--quiet --no-deps --generate-hashes --no-header --no-annotate - -o requirements.lock

audit: install  # the locked versions against the public advisories; needs a network that reaches them
	$(BIN)/python -m pip install -qq pip-audit
	$(BIN)/pip-audit --strict --require-hashes -r requirements.lock

package: install  # the wheel, made from the sdist, in an empty environment: it prices a plan without torch
	$(BIN)/python tests/package.py

oldest: install  # the tests of the core with the oldest version of each dependency that pyproject.toml allows
	$(BIN)/python tests/package.py --oldest

pythons: install  # the tests of the core with each newer Python that is installed
	$(BIN)/python tests/package.py --pythons

release: test frameworks site package oldest pythons  # everything that must hold before a version is tagged
	$(BIN)/pytest tests/test_cli.py -k version
	git diff --quiet && git diff --cached --quiet || { echo "commit first"; exit 1; }

clean:
	rm -rf .venv build dist out site
