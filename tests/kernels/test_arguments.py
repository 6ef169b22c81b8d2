"""What goes to compiled loops, by name; and how long lists of parameters are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import horosphere
from horosphere.kernels.numba.arguments import Layout

LAYOUT = Layout(("rows", "columns"), {"x": ("rows", "columns", 2), "bias": ("rows",)}, frozenset({"bias"}))
GOOD = {"rows": 3, "columns": 4, "x": torch.zeros(3, 4, 2), "bias": None}


def test_a_record_holds_numbers_and_addresses_by_name():
    record = LAYOUT.record(GOOD)
    assert record.dtype.names == ("sgemm", "rows", "columns", "x", "bias")
    assert record[0].tolist() == (0, 3, 4, GOOD["x"].data_ptr(), 0)
    bias = torch.zeros(3)
    assert LAYOUT.record(GOOD | {"bias": bias})[0]["bias"] == bias.data_ptr()
    assert LAYOUT.record(GOOD | {"x": torch.zeros(24)})[0]["rows"] == 3  # the count of numbers is what matters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, 2, dtype=torch.float64)}, "x must be .* of 3 x 4 x 2 numbers, got .*float64"),
        ({"x": torch.zeros(3, 4, 3)}, r"of 3 x 4 x 2 numbers, got contiguous torch.float32 \(3, 4, 3\)"),
        ({"x": torch.zeros(2, 4, 3).mT}, "contiguous float32 tensor .* got strided"),
        ({"x": torch.zeros(3, 4, 2, device="meta")}, "on meta"),
        ({"x": None}, "got NoneType"),
        ({"x": 7}, "got int"),
        ({"rows": torch.tensor(3)}, "rows must be a whole number, got Tensor"),
        ({"rows": None}, "rows must be a whole number, got NoneType"),
        ({"bias": torch.zeros(4)}, "bias must be .* of 3 numbers"),
        ({"another": 1}, r"\['another'\] is missing or unknown"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_loop_sees_it(change, message):
    with pytest.raises(ValueError, match=message):
        LAYOUT.record(GOOD | change)


def test_a_missing_name_is_refused():
    with pytest.raises(ValueError, match=r"\['columns'\] is missing"):
        LAYOUT.record({name: value for name, value in GOOD.items() if name != "columns"})


MOST = 16


def test_no_function_of_a_kernel_has_more_parameters_than_a_reader_can_hold():
    found = []
    for file in sorted((Path(horosphere.__file__).parent / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                if count > MOST:
                    found.append(f"{file.name}:{node.lineno} {node.name}: {count}")
    assert not found, "\n".join(found)
