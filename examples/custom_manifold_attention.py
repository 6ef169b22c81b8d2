"""Attention on manifolds of your own, in one to three small methods.

Two of them. `CityBlock` has nothing but a distance (level 0): everything works, through blocks of rows of ``dist``.
`Clock` is a circle of 24 hours with a chord (level 1): everything works as matrix products. The task is interpolation:
given temperatures at some hours of the day, what was it at others? Attention by inverse distance is Shepard's
interpolation; on the clock 23:30 is near 0:30, on a line it is not.

    python examples/custom_manifold_attention.py [--quick]
"""

import argparse
import math

import torch

import horosphere as hs  # before geoopt, whose own import warns

# isort: split
from geoopt import Euclidean


class CityBlock(Euclidean):
    """Level 0: R^n with the distance of a taxi, the sum of |x_i - y_i|."""

    def dist(self, x, y, *, keepdim=False):
        return (x - y).abs().sum(-1, keepdim=keepdim)


class Clock(Euclidean):
    """Level 1: points are hours, several clocks side by side; each is a circle of circumference 24."""

    def dist(self, x, y, *, keepdim=False):
        return torch.linalg.vector_norm(self.projx(x - y), dim=-1, keepdim=keepdim)

    def projx(self, x):
        return x - 24 * torch.round(x / 24)

    def chord(self, x):
        radius = 24 / (2 * math.pi)  # a circle is a sphere of curvature 1 / radius^2 in the plane
        on_circles = [radius * torch.stack((torch.cos(a), torch.sin(a)), -1) for a in (x / radius).unbind(-1)]
        return tuple(hs.Chord(points, None, 0, radius**-2) for points in on_circles)


def temperature(hour):
    return 12 + 8 * torch.cos((hour - 15) * 2 * math.pi / 24) + 3 * torch.cos((hour - 2) * 2 * math.pi / 6)


def interpolate(manifold, hours, asked):
    """Shepard's interpolation is one line of attention: query, key and value are hours, hours and temperatures."""
    return hs.attention.geodesic_attention(asked, hours, temperature(hours), manifold, eps=0.05, power=1.5)


def learn(manifold, steps, **pattern):
    """A causal transformer block that predicts the next value of noisy waves; its loss before and after training."""
    torch.manual_seed(0)
    attention = hs.attention.GeodesicAttention(16, 2, manifold=manifold, rotary=1000.0, **pattern)
    into, block, out = torch.nn.Linear(1, 16), hs.attention.TransformerBlock(attention), torch.nn.Linear(16, 1)
    model = torch.nn.ModuleList((into, block, out))
    optimizer = hs.optim.RiemannianAdam(hs.optim.param_groups(model), lr=3e-3)
    losses = []
    for _ in range(steps):
        phase, speed = 6 * torch.rand(32, 1, 1), 0.3 + torch.rand(32, 1, 1)
        wave = torch.sin(phase + speed * torch.arange(25.0).view(1, -1, 1))
        predicted = out(block(into(wave[:, :-1]), is_causal=True))
        loss = (predicted - wave[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    with torch.no_grad():  # token by token with a cache: the same numbers
        cache = block.new_cache()
        whole = block(into(wave), is_causal=True)
        one_by_one = torch.cat([block(into(wave[:, t : t + 1]), cache=cache) for t in range(25)], 1)
    return losses[0], losses[-1], (one_by_one - whole).abs().max().item()


def main(quick: bool = False) -> None:
    torch.manual_seed(0)
    hours, asked = 24 * torch.rand(100, 16, 1), 24 * torch.rand(100, 500, 1)  # 100 days of 16 readings
    night = (asked < 2) | (asked > 22)
    for name, manifold in (("line", hs.Euclidean()), ("clock", Clock(ndim=1))):
        error = interpolate(manifold, hours, asked) - temperature(asked)
        overall, at_night = (e.square().mean().sqrt().item() for e in (error, error[night]))
        print(f"{name:5} temperatures off by {overall:.2f} degrees, by {at_night:.2f} around midnight")

    patterns = {
        "dense": {},
        "fixed": {"pattern": "fixed", "n_max": 25},
        "landmark": {"pattern": "landmark", "landmarks": 8},
        "summary": {"pattern": "summary", "slots": 8, "chunk": 4},
    }
    for manifold in (CityBlock(ndim=1), Clock(ndim=1)):
        level = 0 if hs.chord_of(manifold, torch.zeros(1, 1)) is None else 1
        for name, pattern in patterns.items():
            first, last, gap = learn(manifold, 3 if quick else 60, **pattern)
            print(
                f"{type(manifold).__name__}, level {level}, {name}: loss {first:.3f} -> {last:.3f}, "
                f"decoded step by step {gap:.0e} off"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three steps of training: a few seconds")
    main(parser.parse_args().quick)
