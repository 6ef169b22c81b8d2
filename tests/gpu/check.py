"""The cases of every kernel and a short benchmark on a GPU; says so where there is none.

    python tests/gpu/check.py [--out FILE]

Runs the Triton form of every case of tests/kernels/cases.py and its kin, forward and every gradient, against
the reference in float64; the tiled form on the device; cdist and knn as a user calls them; attention twice, for equal
bits; then times the distance matrix beside the bare matrix product, nearest neighbours in both forms, and attention
beside torch's own.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the cases fill torch.empty with NaN in deterministic mode
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.nn.functional import scaled_dot_product_attention

import horosphere as hs
from tests.kernels import attention_cases, cases, far_out_cases, metric_attention_cases, metric_cases, nearest_cases

ROUNDS = 20
WORKERS = 8


def milliseconds(call) -> float:
    """Median of device time; compiled and warm."""
    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def as_a_user() -> None:
    """cdist and knn on the device against exact distances on the CPU."""
    manifold = hs.PoincareBall(-1.0, learnable=True).cuda()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.rand(300, 5, generator=generator) * 0.4).to(dtype)
        true = hs.cdist(x.double(), x.double(), hs.PoincareBall(-1.0), precision="exact")
        device_x = x.cuda().requires_grad_()
        found = hs.cdist(device_x, device_x, manifold)
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(found.detach().cpu().double(), true.detach(), rtol=tolerance, atol=1e-300)
        gradients = torch.autograd.grad(found.sum(), (device_x, *manifold.parameters()))
        assert all(bool(g.isfinite().all()) for g in gradients)
        near = hs.knn(x.cuda(), x.cuda(), manifold, 4)
        assert torch.equal(near.indices.cpu(), hs.knn(x, x, hs.PoincareBall(-1.0), 4).indices)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert hs.cdist(x.float().cuda(), x.float().cuda(), manifold).dtype == torch.float32


def to_the_last_bit() -> None:
    """Two runs of attention by Triton, with a bias that batch entries share, give the same bits."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda().requires_grad_()

    q, k, v, factor, bias = draw(4, 300, 40), draw(4, 500, 40), draw(4, 500, 40), draw(4, 500, 40, 2), draw(300, 500)
    metric = hs.TokenMetric(torch.ones(4, 500, device="cuda"), factor)
    for leaves, call in (
        ((q, k, v, bias), lambda: hs.attention.geodesic_attention(q, k, v, hs.Euclidean(), attn_mask=bias)),
        (
            (q, k, v, bias, factor),
            lambda: hs.attention.metric_attention(q, k, v, None, metric, end="key", attn_mask=bias),
        ),
    ):
        one, two = ([out, *torch.autograd.grad(out.sum(), leaves)] for out in (call(), call()))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def benchmark() -> list[str]:
    lines = [f"{'n':>6s} {'d':>4s}  product  cdist   fast  fwd+bwd  (ms, ratio to the product)"]
    ball = hs.PoincareBall(-1.0)
    for n, d in ((4096, 10), (4096, 64), (16384, 10)):
        x = ball.expmap0(torch.randn(n, d, generator=torch.Generator().manual_seed(0)) * (0.75 / d**0.5)).cuda()
        leaf, upper = x.clone().requires_grad_(), torch.ones(n, n, device="cuda")
        times = [
            milliseconds(lambda x=x: x @ x.T),
            milliseconds(lambda x=x: hs.cdist(x, x, ball)),
            milliseconds(lambda x=x: hs.cdist(x, x, ball, precision="fast")),
            milliseconds(lambda a=leaf, g=upper: torch.autograd.grad(hs.cdist(a, a, ball), a, g)),
        ]
        lines.append(f"{n:6d} {d:4d}  " + "  ".join(f"{t:.3f} ({t / times[0]:.1f})" for t in times))
    for n in (16384, 131072):
        x = ball.expmap0(torch.randn(n, 10, generator=torch.Generator().manual_seed(0)) * 0.25).cuda()
        times = [milliseconds(lambda x=x, i=impl: hs.knn(x, x, ball, 10, impl=i)) for impl in ("triton", "tiled")]
        lines.append(f"{n:6d}   10 nearest in 10 dimensions: triton {times[0]:.3f}, tiled {times[1]:.3f}")
    lines.append(
        f"{'n':>6s} attention, 8 heads of 64: torch's  flat  ball, forward; torch's  flat  ball, with gradient"
    )
    for n in (1024, 4096):
        q, k, v = (torch.randn(8, n, 64, device="cuda", requires_grad=True) for _ in range(3))
        points = [(ball.expmap0(t.detach() * 0.1)).requires_grad_() for t in (q, k)]
        calls = [
            lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v),
            lambda q=q, k=k, v=v: hs.attention.geodesic_attention(q, k, v, hs.Euclidean()),
            lambda p=points, v=v: hs.attention.geodesic_attention(*p, v, ball),
        ]
        times = [milliseconds(call) for call in calls]
        times += [milliseconds(lambda call=call, v=v: torch.autograd.grad(call().sum(), v)) for call in calls]
        lines.append(f"{n:6d}  " + "  ".join(f"{t:.3f} ({t / times[3 * (i > 2)]:.1f})" for i, t in enumerate(times)))
    lines.append(f"{'n':>6s} the same with metrics of 4 columns, triton forward, with gradient, tiled; query, mean")
    for n in (1024, 4096):
        q, k, v = (torch.randn(8, n, 64, device="cuda", requires_grad=True) for _ in range(3))
        metric = hs.TokenMetric(torch.ones(8, n, device="cuda"), torch.randn(8, n, 64, 4, device="cuda"))
        times = []
        for end, impl in itertools.product(("query", "mean"), ("triton", "tiled")):

            def call(end=end, impl=impl, tensors=(q, k, v, metric, metric)):
                return hs.attention.metric_attention(*tensors, end=end, impl=impl)

            times += [milliseconds(call), milliseconds(lambda call=call, v=v: torch.autograd.grad(call().sum(), v))]
        lines.append(f"{n:6d}  " + "  ".join(f"{t:.3f}" for t in times))
    return lines


def checks() -> dict[str, Callable[[], None]]:
    """Every check by its name."""
    of_cases = {
        f"{impl} {of.__name__} {c.name}": lambda c=c, i=impl, of=of: of.check(c, i, "cuda")
        for impl in ("triton", "tiled")
        for of in (cases, nearest_cases, attention_cases, far_out_cases, metric_cases, metric_attention_cases)
        for c in of.CASES
    }
    others = {"cdist and knn as a user calls them": as_a_user, "attention to the last bit": to_the_last_bit}
    return of_cases | others


def failure(name: str) -> str | None:
    """What went wrong in a check."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        checks()[name]()
    except Exception:
        return traceback.format_exc(limit=-2)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    import triton

    start = time.perf_counter()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"]
    names = list(checks())
    # what takes time is compiling: in several processes, of which one may die
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        found = {name: pool.submit(failure, name) for name in names}
    failures = {name: repr(f.exception()) if f.exception() else f.result() for name, f in found.items()}
    lines += [f"FAILED {name}\n{what}" for name, what in failures.items() if what]
    failed = sum(what is not None for what in failures.values())
    lines.append(f"{len(names) - failed} of {len(names)} checks passed in {time.perf_counter() - start:.0f} s")
    if not failed:  # no figure on red tests
        lines += benchmark()
    print("\n".join(lines))
    if out:
        out.write_text("\n".join(lines) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
