"""Replicas stay equal under DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from horosphere import ManifoldParameter, PoincareBall
from horosphere.optim import RiemannianAdam, RiemannianSGD, param_groups


class Table(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.manifold = PoincareBall(-1.0, learnable=True)
        self.embedding = torch.nn.Embedding(4, 2, sparse=sparse)
        self.embedding.weight = ManifoldParameter(0.1 * torch.arange(8.0).reshape(4, 2), self.manifold)

    def forward(self, ids):
        return self.manifold.dist0(self.embedding(ids)).sum()


def replica(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for name, optimizer_class in (("adam", RiemannianAdam), ("sgd", RiemannianSGD)):
            for sparse in (False, True):
                model = torch.nn.parallel.DistributedDataParallel(Table(sparse).float())
                optimizer = optimizer_class(param_groups(model), lr=0.05)
                for _ in range(3):  # rank r touches row r
                    optimizer.zero_grad()
                    model(torch.tensor([rank, rank])).backward()
                    optimizer.step()
                torch.save(model.module.state_dict(), f"{results}/{name}-{sparse}-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_73_replicas_stay_equal(tmp_path):
    """Fault 73; slow because two fresh processes import torch. Forking would not do: autograd has run here."""
    mp.spawn(replica, args=(tmp_path / "store", str(tmp_path)), nprocs=2)
    for name in ("adam", "sgd"):
        for sparse in (False, True):
            first, second = (torch.load(tmp_path / f"{name}-{sparse}-{rank}.pt") for rank in (0, 1))
            assert all(torch.equal(first[key], second[key]) for key in first)
            weight, start = first["embedding.weight"], 0.1 * torch.arange(8.0).reshape(4, 2)
            # Row 0 is the origin, where d(., 0) has no gradient; the curvature moved, so the rest was projected.
            assert not torch.equal(weight[1], start[1])
            assert first["manifold._learnable_kappa"].item() != -1.0
