# Everything runs in one .venv at the root; a target makes what it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test check fuzz bench docs site clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshwise needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	touch $(STAMP)

demo: install
	$(BIN)/meshwise estimate gpt3-175b --cluster a100-80g-sxm:4 --plan tp=4,sp=1 --batch 1 --seq 2048 --per-layer
	$(BIN)/meshwise estimate gpt3-175b --cluster a100-80g-sxm:512 --plan tp=8,pp=8,vpp=3,recompute=selective \
	    --batch 512 --seq 2048 --tokens 300e9

check: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/pytest tests/test_house.py

test: check
	$(BIN)/pytest -n 2 --dist loadfile --ignore tests/test_network.py
	$(BIN)/pytest tests/test_network.py  # measures time, so nothing runs beside it

fuzz: install  # make fuzz CASES=20000 SEED=1: so many hostile inputs for each kind of input
	CASES=$(or $(CASES),1000) $(BIN)/pytest tests/test_fuzz.py --hypothesis-seed=$(or $(SEED),0)

bench: install
	$(BIN)/python -m benchmarks

docs: install
	set -e; for figures in docs/figures/*.py; do $(BIN)/python $$figures; done
	$(BIN)/python docs/rerun.py README.md docs/*.md docs/*/*.md

site: install  # the pages as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf .venv build dist out site
