"""Put the measured figures into docs/attention.md: the tables between its markers, from benchmarks/results/.

    python benchmarks/attention_page.py

Run it after landmark_error.py, patterns.py or run.py's attention was run.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from report import RESULTS, saved

__all__ = ["TABLES", "fill", "main"]

PAGE = Path(__file__).parents[1] / "docs" / "attention.md"
LENGTHS = (1024, 4096, 16384, 65536)


def landmarks() -> str:
    """Errors on the ball: flat space and sphere are alike."""
    numbers = saved("landmark_error")
    rows = []
    for name, errors in numbers["errors"].items():
        space, keys, values, form = name.split(", ", 3)
        if space == "ball":
            rows.append([f"{keys}, {values}", form, *(f"{e:.2g}" if e > 1e-9 else "0" for e in errors)])
    return _table(["keys and values", "form", *(f"m = {m}" for m in numbers["counts"])], rows)


def patterns() -> str:
    """Milliseconds by length, flat space and ball."""
    numbers = saved("patterns")
    rows = []
    for space, of_space in numbers["seconds"].items():
        for pattern, seconds in of_space.items():
            times = (seconds.get(str(n)) for n in LENGTHS)
            rows.append([space, pattern, *("" if t is None else _milliseconds(t) for t in times)])
    threads = f"{numbers['threads']} thread" + ("s" if numbers["threads"] > 1 else "")
    return _table(["space", f"pattern (ms, {threads})", *(f"N = {n:,}" for n in LENGTHS)], rows)


def beside_torch() -> str:
    """Milliseconds and times torch's own: a column for each table of times."""
    tables = [t for t in saved("attention")["tables"] if t["times"]]
    rows = []
    for name in tables[0]["times"]:
        cells = []
        for table in tables:
            of_torch = table["times"]["torch, causal" if "causal" in name else "torch"]["min_ms"]
            here = table["times"][name]["min_ms"]
            cells.append(_milliseconds(here / 1e3) + ("" if name.startswith("torch") else f" ({here / of_torch:.2f})"))
        rows.append([name, *cells])
    heads = (re.fullmatch(r"attention, (.*), float32, .*, (N = \d+)", t["title"]).groups() for t in tables)
    return _table(["ms (times torch)", *(", ".join(h) for h in heads)], rows)


TABLES = {"landmark_error": landmarks, "patterns": patterns, "attention": beside_torch}


def fill(text: str) -> str:
    """The page with what stands between ``<!-- NAME -->`` and ``<!-- end -->`` made anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{PAGE.name} must have one place for {name}")
        text = pattern.sub(rf"\1\n{table()}\n\n\2", text)
    return text


def main() -> None:
    absent = [name for name in TABLES if not (RESULTS / f"{name}.json").exists()]
    if absent:
        raise SystemExit(f"not measured yet: {', '.join(absent)}")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
