"""Tensors that a function makes name their device: a default device of the user plays no part."""

import ast
from pathlib import Path

import horosphere

FACTORIES = set(
    "tensor as_tensor zeros empty ones full arange linspace logspace eye rand randn randint randperm".split()
)


def unnamed(source):
    """Lines of calls torch.zeros(...) and the like without device=, outside of constructors.

    Constructors are left out: the numbers of a module follow the default device, as those of torch's own modules.
    """
    found = []

    def visit(node):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            owner = node.func.value
            named = {k.arg for k in node.keywords} & {"device", None}  # None: **options
            if isinstance(owner, ast.Name) and owner.id == "torch" and not named:
                found.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def test_the_walk_sees_a_missing_device():
    assert unnamed("import torch\ntorch.zeros(3)\ntorch.ones(3, device=d)\ntorch.zeros_like(x)") == [2]


def test_every_tensor_names_its_device():
    package = Path(horosphere.__file__).parent
    found = {
        f"{path.relative_to(package)}:{line}"
        for path in sorted(package.rglob("*.py"))
        for line in unnamed(path.read_text(encoding="utf-8"))
    }
    assert not found
