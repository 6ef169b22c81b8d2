# One virtual environment serves every target; it is made again when the dependencies change.
PYTHON ?= python3
# Folders of the graphs that are not shipped, for `make evidence`; here WordNet as Debian installs it.
GRAPHS ?= $(wildcard /usr/share/wordnet)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-processors evidence lint clean

demo: $(READY)
	$(BIN)/horosphere embed horosphere/data/mammals.tsv --closure --dim 5 --out mammals.safetensors
	$(BIN)/horosphere nearest mammals.safetensors dog.n.01 -k 5
	$(BIN)/horosphere embed horosphere/data/mammals.tsv --closure --dim 2 --plot mammals.png
	@echo "mammals.safetensors: the 1,182 mammals in 5 dimensions; mammals.png: the same in the 2 dimensions of a picture"

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# Other processors, as far as this one can play them: torch, MKL and numba with fewer instructions, other numbers of
# threads. Each line is a process of its own, since libraries look at their processor once. torch.compile is left out
# (inductor compiles for the processor itself), Triton is too (its interpreter is NumPy).
PLAYED := -q --ignore=tests/kernels/test_triton.py --ignore=tests/manifolds/test_compile.py
EXACT := tests/kernels tests/manifolds tests/memory tests/embedding
THREADED := tests/kernels tests/memory

test-processors: $(READY)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(BIN)/python -m pytest -n auto $(PLAYED) $(EXACT)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(BIN)/python -m pytest -n auto $(PLAYED) $(EXACT)
	OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE NUMBA_CPU_NAME=generic $(BIN)/python -m pytest -n auto $(PLAYED) $(EXACT)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(PLAYED) $(THREADED)
	OMP_NUM_THREADS=3 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(PLAYED) $(THREADED)

evidence: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quality.py $(GRAPHS:%=--graphs %)
	$(BIN)/python benchmarks/fiber_bundle.py
	$(BIN)/python benchmarks/georesolver.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent --cache-dir=.mypy_cache/strict tests/typed_user.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f mammals.png mammals.safetensors
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
