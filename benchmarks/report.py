"""What a part of quality.py leaves behind: text on stdout, the same text and the numbers in benchmarks/results/."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["RESULTS", "report", "save", "saved", "verdict"]

RESULTS = Path(__file__).parent / "results"


def report(name: str, *shown: Any, **numbers: Any) -> None:
    """Print tables and lines; write them to results/NAME.txt and the numbers to results/NAME.json."""
    save(name, **numbers)
    with (RESULTS / f"{name}.txt").open("w", encoding="utf-8") as text:
        for console in (Console(width=150), Console(width=150, file=text)):
            for item in shown:
                console.print(item)


def save(name: str, **numbers: Any) -> None:
    """Write the numbers, with the versions that they hold for, to results/NAME.json."""
    import torch

    RESULTS.mkdir(exist_ok=True)
    about = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, **numbers}, indent=1) + "\n", encoding="utf-8")


def saved(name: str) -> dict[str, Any]:
    """What `save` wrote; nothing where there is no file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def verdict(passed: bool) -> str:
    return "pass" if passed else "MISS"
