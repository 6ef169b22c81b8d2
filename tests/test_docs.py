"""The Python blocks of the documentation run; a page that defines test classes is run by pytest, as a module."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from horosphere.embedding.losses import base

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [*sorted(page.name for page in DOCS.glob("*.md")), "../README.md"]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def source(page: str) -> str:
    """The page with all but its Python blocks blanked: line numbers in a traceback are those of the page."""
    text = (DOCS / page).read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


def test_the_pages_are_there():
    assert {"add_a_manifold.md", "chord.md", "conventions.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    code = source(page)
    monkeypatch.setattr(base, "_LOSSES", dict(base._LOSSES))  # a loss that a page registers is for that page
    assert code.strip(), f"{page} has no Python block"
    if "ManifoldContract" not in code:
        exec(compile(code, str(DOCS / page), "exec"), {"__name__": page})
        return
    module = tmp_path / "test_page.py"
    module.write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", module.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", (DOCS / page).read_text()):
        assert ((DOCS / page).parent / target).exists(), f"{page}: {target}"
