# One virtual environment serves every target; it is made again when the dependencies change.
PYTHON ?= python3
# Folders of the graphs that are not shipped, for `make evidence`; here WordNet as Debian installs it.
GRAPHS ?= $(wildcard /usr/share/wordnet)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test evidence lint clean

demo: $(READY)
	$(BIN)/horosphere embed horosphere/data/mammals.tsv --closure --dim 5 --out mammals.safetensors
	$(BIN)/horosphere nearest mammals.safetensors dog.n.01 -k 5
	$(BIN)/horosphere embed horosphere/data/mammals.tsv --closure --dim 2 --plot mammals.png
	@echo "mammals.safetensors: the 1,182 mammals in 5 dimensions; mammals.png: the same in the 2 dimensions of a picture"

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

evidence: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quality.py $(GRAPHS:%=--graphs %)
	$(BIN)/python benchmarks/fiber_bundle.py
	$(BIN)/python benchmarks/georesolver.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	rm -f mammals.png mammals.safetensors
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
