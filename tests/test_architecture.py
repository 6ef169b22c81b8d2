"""The rules of the tree: who may import whom, what importing the package loads, and where constants live."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import horosphere

PACKAGE = Path(horosphere.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Each part of the package, and the parts that it may import besides itself. What is not listed is at the bottom and
# imports none of them.
MAY_IMPORT = {
    "kernels": set(),
    "manifolds": {"kernels"},
    "optim": {"manifolds"},
    "testing": {"attention", "manifolds"},
    "attention": {"manifolds", "kernels"},
    "diagnostics": {"attention", "manifolds"},
    "memory": {"attention", "manifolds"},
    "routing": {"attention", "manifolds"},
    "models": {"memory", "routing", "attention", "optim", "manifolds", "diagnostics"},
    "data": set(),
    "embedding": {"manifolds", "optim", "data"},
    "integrations": {"models", "memory", "routing", "attention", "manifolds"},
    "cli": {"embedding", "manifolds", "data"},
}
# Files of one form of the kernels that others may import: none, but for the table that chooses.
FORMS = {"triton", "numba"}


def part_of(module: str) -> str:
    """ "manifolds" of "horosphere.manifolds.chord"; "" of the package itself."""
    return [*module.split("."), ""][1]


def module_of(file: Path) -> str:
    return ".".join(["horosphere", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def imports_of(file: Path):
    """(line, module) of every import of the package itself, wherever in the file it stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "horosphere")


def test_every_part_has_its_place():
    parts = {part_of(module_of(file)) for file in FILES}
    assert set(MAY_IMPORT) == {part for part in parts if part and not part.startswith("_")}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part):
    found = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for file in FILES
        if part_of(module_of(file)) == part
        for line, name in imports_of(file)
        if (to := part_of(name)) in MAY_IMPORT and to != part and to not in MAY_IMPORT[part]
    ]
    assert not found, "\n".join(found)


def test_the_order_has_no_circle():
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        free = {part for part, needs in MAY_IMPORT.items() if part not in done and needs <= done}
        assert free, f"in a circle: {set(MAY_IMPORT) - done}"
        done |= free


def test_what_is_private_imports_no_part():
    """Modules whose names start with an underscore, right inside the package, are for all parts."""
    found = [
        f"{file.name}:{line} imports {name}"
        for file in PACKAGE.glob("_*.py")
        if file.name not in ("__init__.py", "__main__.py")
        for line, name in imports_of(file)
        if part_of(name) in MAY_IMPORT
    ]
    assert not found, "\n".join(found)


def test_only_kernels_import_a_form_of_a_kernel():
    found = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for file in FILES
        if part_of(module_of(file)) != "kernels"
        for line, name in imports_of(file)
        if name.split(".")[1:2] == ["kernels"] and set(name.split(".")[2:3]) & FORMS
    ]
    assert not found, "\n".join(found)


def test_the_package_loads_nothing_heavy_and_prints_nothing():
    heavy = ["triton", "numba", "matplotlib", "transformers", "sklearn", "networkx", "pandas", "hypothesis"]
    code = f"import sys, horosphere; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# A number this small or large is a guard against rounding or overflow.
SMALLEST, LARGEST = 1e-4, 1e6


def guards(tree: ast.Module):
    """(line, number) of guards, but for defaults of parameters and fields, which are for the caller to choose."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        chosen: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            chosen = [*node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            chosen = [field.value for field in node.body if isinstance(field, ast.AnnAssign)]
        for value in chosen:
            skipped |= {id(part) for part in ast.walk(value)} if value is not None else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and id(node) not in skipped:
            if node.value and not SMALLEST <= abs(node.value) <= LARGEST:
                yield node.lineno, node.value


def test_guards_live_in_numerics():
    """The tolerances of ManifoldContract are no guards: they are what it promises."""
    found = [
        f"{file.relative_to(PACKAGE)}:{line} holds {number}"
        for file in FILES
        if file.name != "_numerics.py" and part_of(module_of(file)) != "testing"
        for line, number in guards(ast.parse(file.read_text()))
    ]
    assert not found, "\n".join(found)


def test_the_rules_see_what_breaks_them():
    assert list(guards(ast.parse("def f(eps=1e-9, *, k=1e-8):\n    return 1e-7"))) == [(2, 1e-7)]
    assert list(guards(ast.parse("class C:\n    eps: float = 1e-9\nTINY = 1e-30"))) == [(3, 1e-30)]
    assert part_of("horosphere.kernels.triton.sqdist") == "kernels" and part_of("horosphere") == ""
