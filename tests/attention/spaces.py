"""The manifolds on which the patterns are tested, and points on them."""

import torch

import horosphere as hs

f64 = torch.float64


class OnlyDist(hs.PoincareBall):
    """A ball of which only ``dist`` is known: a class that defines dist does not inherit its parent's chord."""

    def dist(self, x, y, *, keepdim=False):
        return super().dist(x, y, keepdim=keepdim)


SPACES = {
    "euclidean": lambda: hs.Euclidean(),
    "ball": lambda: hs.PoincareBall(-1.3),
    "sphere": lambda: hs.Sphere(0.8),
    "lorentz": lambda: hs.Lorentz(-0.7),
    "stereographic": lambda: hs.Stereographic(0.6),
    "product": lambda: hs.Product((hs.PoincareBall(-1.0), 2), (hs.Sphere(1.0), 2)),
    "scaled": lambda: hs.Scaled(hs.Lorentz(-1.0), 1.5),
    "heads": lambda: hs.PoincareBall(torch.tensor([-0.4, -1.6], dtype=f64)),
    "only dist": lambda: OnlyDist(-1.0),
}


def tokens(manifold, n, m=None, *, batch=(3, 2), size=4, values=3, seed=0, dtype=f64):
    """query (B, H, N, D), key (B, H, M, D), value (B, H, M, Dv)."""
    torch.manual_seed(seed)
    m = n if m is None else m
    base = hs.PoincareBall(-1.6) if isinstance(getattr(manifold, "kappa", None), torch.Tensor) else manifold
    query, key = (base.random(*batch, rows, size, dtype=f64).to(dtype) for rows in (n, m))
    return query, key, torch.randn(*batch, m, values, dtype=f64).to(dtype)


def crowd(manifold, n):
    """Keys (1, 2, n, 4) and values in float32, the keys so near each other that the product form takes them for one."""
    _, key, value = tokens(manifold, n, batch=(1, 2))
    torch.manual_seed(1)
    key = manifold.projx(key[..., :1, :] + 0.01 * torch.randn_like(key))
    return key.float(), value.float()


def of_head(manifold, h):
    """The manifold of head h, where heads have curvatures of their own."""
    kappa = getattr(manifold, "kappa", None)
    if isinstance(kappa, torch.Tensor) and kappa.dim():
        return type(manifold)(kappa[h].item())
    return manifold


def weight(manifold, x, y, eps=1e-3, power=1.0):
    """(d(x, y)^2 + eps)^-power of a point and one or more others, by the manifold's own dist."""
    return (manifold.dist(x, y) ** 2 + eps) ** -power
