"""The growing pool against the rule written out one token at a time, and every property it promises."""

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.stats import t as student

import horosphere as hs
from horosphere.memory import DynamicMemory
from tests.attention.spaces import SPACES

f64 = torch.float64
BALL = hs.PoincareBall()


def stream(manifold, n, dim=4, value_dim=3, seed=0):
    torch.manual_seed(seed)
    losses = torch.randn(n, dtype=f64)
    losses[::7] += 3
    return manifold.random(n, dim, dtype=f64), torch.randn(n, value_dim, dtype=f64), losses


class Oracle:
    """The pool as a list, the rule as the text says it, with the manifold's own dist, logmap and expmap."""

    def __init__(self, manifold, capacity, window, k, threshold="mean", base=None, policy="lru", chunk=1):
        self.m, self.capacity, self.window, self.k, self.chunk = manifold, capacity, window, k, chunk
        self.threshold, self.base, self.policy = threshold, base, policy
        self.pool, self.losses, self.surprises = [], [], 0

    def surprising(self, loss):
        t = len(self.losses)
        if t < self.window:
            return False
        past = torch.tensor(self.losses[-self.window :], dtype=f64)
        deviation, factor = past.std(correction=0), self.k
        if self.threshold == "growing":
            factor = math.sqrt(self.k**2 + 2 * math.log(t / self.window))
        return bool(loss > (self.base if self.threshold == "base" else past.mean()) + factor * deviation + 1e-12)

    def join(self, i, j):
        a, b = self.pool[i], self.pool[j]
        n = a["n"] + b["n"]
        a["c"] = self.m.expmap(a["c"], self.m.logmap(a["c"], b["c"]) * b["n"] / n)
        a.update(n=n, sum=a["sum"] + b["sum"], hits=a["hits"] + b["hits"])
        a.update(birth=min(a["birth"], b["birth"]), last=max(a["last"], b["last"]))

    def spawn(self, entry):
        if len(self.pool) < self.capacity:
            self.pool.append(entry)
            return
        if self.policy == "merge":
            pairs = [
                (float(self.m.dist(a["c"], b["c"])), i, j)
                for i, a in enumerate(self.pool)
                for j, b in enumerate(self.pool)
                if i < j
            ]
            _, i, j = min(pairs)
            self.join(i, j)
            self.pool[j] = entry
            return
        key = (lambda p: p["last"]) if self.policy == "lru" else (lambda p: (p["hits"], p["last"]))
        self.pool[min(range(len(self.pool)), key=lambda i: key(self.pool[i]))] = entry

    def write(self, keys, values, losses):
        for key, value, loss in zip(keys, values, losses, strict=True):
            now, surprise = len(self.losses), self.surprising(loss)
            self.surprises += surprise
            if surprise or not self.pool:
                self.spawn({"c": key, "sum": value.clone(), "n": 1, "hits": 0, "birth": now, "last": now})
            else:
                p = min(self.pool, key=lambda p: float(self.m.dist(p["c"], key)))
                p["n"] += 1
                p["c"] = self.m.expmap(p["c"], self.m.logmap(p["c"], key) / p["n"])
                p.update(sum=p["sum"] + value, hits=p["hits"] + 1, last=now)
            self.losses.append(float(loss))


def assert_same(memory, oracle):
    assert len(memory) == len(oracle.pool) and int(memory.steps) == len(oracle.losses)
    for name in ("birth", "hits", "last"):
        assert getattr(memory, name)[: len(memory)].tolist() == [p[name] for p in oracle.pool]
    assert memory.counts[: len(memory)].tolist() == [p["n"] for p in oracle.pool]
    assert torch.allclose(memory.points, torch.stack([p["c"] for p in oracle.pool]), atol=1e-9)
    assert torch.allclose(memory.values, torch.stack([p["sum"] / p["n"] for p in oracle.pool]), atol=1e-9)
    assert int(memory.surprises) == oracle.surprises


@pytest.mark.parametrize("name", [name for name in SPACES if name != "heads"])
def test_chunk_1_is_the_rule_one_token_at_a_time(name):
    manifold = SPACES[name]()
    memory = DynamicMemory(4, 3, 6, manifold, window=10, k=1.5, chunk=1).double()
    oracle = Oracle(manifold, 6, 10, 1.5)
    keys, values, losses = stream(manifold, 80)
    memory.write(keys[:30], values[:30], losses[:30])
    memory.write(keys[30:], values[30:], losses[30:])
    oracle.write(keys, values, losses)
    assert oracle.surprises > 8
    assert_same(memory, oracle)


@pytest.mark.parametrize("policy", ["lru", "least hit", "merge"])
@pytest.mark.parametrize("threshold, base", [("mean", None), ("base", 0.2), ("growing", None)])
def test_policies_and_thresholds(policy, threshold, base):
    memory = DynamicMemory(
        4, 3, 5, BALL, window=8, k=1.0, threshold=threshold, base=base, policy=policy, chunk=1
    ).double()
    oracle = Oracle(BALL, 5, 8, 1.0, threshold, base, policy)
    keys, values, losses = stream(BALL, 100, seed=1)
    memory.write(keys, values, losses)
    oracle.write(keys, values, losses)
    assert oracle.surprises > 5
    assert_same(memory, oracle)


def test_a_chunk_decides_on_the_state_at_its_start():
    memory = DynamicMemory(2, 1, 8, hs.Euclidean(), window=2, k=1.0, chunk=4).double()
    one = torch.ones(1, dtype=f64)
    memory.write(
        torch.tensor([[0.0, 0.0], [10.0, 0.0]], dtype=f64), one.expand(2, 1), torch.tensor([0.0, 1.0], dtype=f64)
    )
    assert len(memory) == 1 and memory.points.tolist() == [[5.0, 0.0]]
    # the second token is a surprise and spawns at 9; the last, nearer to it, still goes to the slot of the start
    keys = torch.tensor([[4.0, 0.0], [9.0, 0.0], [6.0, 3.0], [9.0, 3.0]], dtype=f64)
    done = memory.write(keys, one.expand(4, 1), torch.tensor([0.0, 9.0, 0.0, 0.0], dtype=f64))
    assert done.surprising.tolist() == [False, True, False, False] and done.slots.tolist() == [0, 1, 0, 0]
    assert torch.allclose(memory.points, torch.tensor([[(0 + 10 + 4 + 6 + 9) / 5, 6 / 5], [9.0, 0.0]], dtype=f64))
    assert memory.counts[:2].tolist() == [5, 1]


def test_surprises_do_not_depend_on_the_chunk():
    keys, values, losses = stream(BALL, 300)
    found = []
    for chunk in (1, 7, 256):
        memory = DynamicMemory(4, 3, 400, BALL, window=20, k=1.0, chunk=chunk).double()
        found.append(memory.write(keys, values, losses).surprising)
        assert (memory.counts[: len(memory)] > 0).all() and int(memory.counts.sum()) == 300
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].any()


def test_the_loss_itself_is_not_in_its_window():
    memory = DynamicMemory(2, 1, 4, hs.Euclidean(), window=4, k=3.0)
    done = memory.write(torch.zeros(6, 2), torch.zeros(6, 1), torch.tensor([1.0, 2.0, 1.0, 2.0, 3.1, 2.0]))
    assert done.thresholds[:4].isinf().all() and done.thresholds[4].item() == pytest.approx(1.5 + 3 * 0.5)
    assert done.surprising.tolist() == [False] * 4 + [True, False]


def test_constant_losses_hold_no_surprise():
    for value in (0.1, 1e6 + 0.1, -3.3e-9):
        memory = DynamicMemory(2, 1, 4, hs.Euclidean(), window=100, k=0.0)
        done = memory.write(torch.zeros(500, 2), torch.zeros(500, 1), torch.full((500,), value))
        assert not done.surprising.any()


def test_62_evaluation_writes_nothing_and_reads_change_nothing():
    """Fault 62."""
    memory = DynamicMemory(4, 3, 5, BALL, window=8, k=1.0).double()
    keys, values, losses = stream(BALL, 50)
    memory.write(keys, values, losses)
    before = copy.deepcopy(memory.state_dict())
    memory.read(keys)
    memory.eval()
    done = memory.write(keys, values, losses)
    memory.write(keys, values, losses)
    assert not done.surprising.any() and (done.slots == -1).all()
    assert all(torch.equal(before[name], value) for name, value in memory.state_dict().items())


def test_read_is_inverse_distance_attention_to_the_pool():
    memory = DynamicMemory(4, 3, 5, BALL, window=8, k=1.0, eps=0.01, power=2.0).double()
    query = BALL.random(2, 6, 4, dtype=f64).requires_grad_()
    assert (memory.read(query) == 0).all()
    keys, values, losses = stream(BALL, 50)
    memory.write(keys, values, losses)
    out = memory.read(query)
    for i in range(6):
        w = torch.stack([(BALL.dist(query[1, i], c) ** 2 + 0.01) ** -2 for c in memory.points])
        assert torch.allclose(out[1, i], w @ memory.values / w.sum(), atol=1e-9)
    out.sum().backward()
    assert query.grad.isfinite().all() and query.grad.norm() > 0


def test_a_revived_slot_starts_fresh():
    memory = DynamicMemory(2, 1, 1, hs.Euclidean(), window=2, k=1.0)
    memory.write(torch.zeros(9, 2), torch.ones(9, 1), torch.zeros(9))
    assert memory.counts.tolist() == [9] and memory.hits.tolist() == [8]
    memory.write(torch.ones(1, 2), torch.full((1, 1), 5.0), torch.ones(1))
    state = [getattr(memory, n).tolist() for n in ("counts", "hits", "birth", "last", "sums", "centroids")]
    assert state == [[1], [0], [9], [9], [[5.0]], [[1.0, 1.0]]]


def test_more_spawns_than_slots_keep_the_last():
    memory = DynamicMemory(1, 1, 3, hs.Euclidean(), window=1, k=0.0, chunk=100)
    keys = torch.arange(11.0).unsqueeze(-1)
    done = memory.write(keys, keys, torch.arange(11.0))
    assert sorted(memory.points.flatten().tolist()) == [8.0, 9.0, 10.0]
    assert (done.slots >= 0).sum() == 4 and len(memory) == 3


@pytest.mark.parametrize("policy", ["lru", "least hit", "merge"])
def test_large_chunks_fill_different_slots(policy):
    memory = DynamicMemory(4, 3, 6, BALL, window=20, k=1.6, policy=policy, chunk=10).double()
    keys, values, losses = stream(BALL, 400, seed=2)
    memory.write(keys, values, losses)
    assert len(memory) == 6 and len({tuple(c) for c in memory.points.tolist()}) == 6
    BALL.assert_check_point_on_manifold(memory.points)
    if policy == "merge":  # joined slots keep all their tokens
        assert int(memory.counts.sum()) == 400


def test_state_moves_copies_and_goes_on():
    keys, values, losses = stream(BALL, 200)
    memory = DynamicMemory(4, 3, 8, BALL, window=10, k=1.0, chunk=16).double()
    memory.write(keys[:100], values[:100], losses[:100])
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    loaded = DynamicMemory(4, 3, 8, BALL, window=10, k=1.0, chunk=16).double()
    loaded.load_state_dict(torch.load(file))
    copied = copy.deepcopy(memory)
    for one in (memory, loaded, copied):
        one.write(keys[100:], values[100:], losses[100:])
    for name, value in memory.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]) and torch.equal(value, copied.state_dict()[name])
    assert memory.to(torch.float32).centroids.dtype == torch.float32 and memory.counts.dtype == torch.int64


def test_centroids_follow_a_learned_curvature():
    ball = hs.PoincareBall(-1.0, learnable=True)
    memory = DynamicMemory(3, 1, 4, ball, window=2, k=1.0).double()
    memory.write(torch.full((1, 3), 0.55, dtype=f64), torch.ones(1, 1, dtype=f64), torch.zeros(1, dtype=f64))
    with torch.no_grad():
        ball.kappa.fill_(-4.0)
    assert memory.centroids[0].norm() > 0.5
    ball.assert_check_point_on_manifold(memory.points)
    out = memory.read(ball.origin(1, 3, dtype=f64))
    assert out.isfinite().all()
    memory.write(torch.zeros(1, 3, dtype=f64), torch.ones(1, 1, dtype=f64), torch.zeros(1, dtype=f64))
    ball.assert_check_point_on_manifold(memory.centroids)


def test_spawns_on_a_stationary_stream():
    """A fixed k is exceeded with the tail probability of Student's t; the growing threshold's count is like log T."""
    torch.manual_seed(0)
    window, k, n = 100, 3.0, 100_000
    keys, values, losses = torch.randn(n, 2) / 8, torch.zeros(n, 1), torch.randn(n)
    counts = {}
    for threshold in ("mean", "growing"):
        memory = DynamicMemory(2, 1, 16, hs.Euclidean(), window=window, k=k, threshold=threshold, chunk=4096)
        surprising = memory.write(keys, values, losses).surprising
        counts[threshold] = [int(surprising[:t].sum()) for t in (1000, 10_000, 100_000)]
        print(threshold, counts[threshold])
        assert int(memory.surprises) == counts[threshold][-1]
    expected = (n - window) * student.sf(k * math.sqrt((window - 1) / (window + 1)), window - 1)
    assert expected / 1.5 < counts["mean"][-1] < 1.5 * expected
    assert counts["mean"][-1] > 5 * counts["mean"][-2] > 0
    assert counts["growing"][-1] - counts["growing"][0] <= math.log(100)
    assert counts["growing"][-1] < counts["mean"][-1] / 5


def test_a_new_mode_has_a_prototype_within_200_tokens():
    torch.manual_seed(0)
    old, new = (BALL.expmap0(torch.tensor([s, 0.0, 0.0])) for s in (0.5, -0.8))
    memory = DynamicMemory(3, 2, 32, BALL, window=100, k=3.0, chunk=20, eps=0.01)

    def tokens(centre, value, n):
        return BALL.expmap(centre, 0.05 * torch.randn(n, 3)), value + 0.1 * torch.randn(n, 2)

    def feed(centre, value, n):
        for _ in range(n // 20):
            keys, values = tokens(centre, value, 20)
            losses = (memory.read(keys) - values).square().mean(-1)  # read with the prototypes before they move
            memory.write(keys, values, losses)

    feed(old, torch.tensor([1.0, 0.0]), 2000)
    assert BALL.dist(memory.points, new).min() > 1
    feed(new, torch.tensor([0.0, 1.0]), 200)
    assert BALL.dist(memory.points, new).min() < 0.2
    assert (memory.read(new.unsqueeze(0)) - torch.tensor([0.0, 1.0])).norm() < 0.2


def test_63_replicas_with_an_injected_gather():
    """Fault 63: two replicas see different tokens, and hold the same pool."""
    keys, values, losses = stream(BALL, 120)
    parts = [(keys[i::2], values[i::2], losses[i::2]) for i in range(2)]
    memories = [DynamicMemory(4, 3, 5, BALL, window=8, k=1.0).double() for _ in range(2)]
    for i, memory in enumerate(memories):
        sent = iter([torch.cat([parts[0][n], parts[1][n]]) for n in range(3)])
        memory.write(*parts[i], all_gather=lambda rows, sent=sent: next(sent))
    for name, value in memories[0].state_dict().items():
        assert torch.equal(value, memories[1].state_dict()[name])
    assert int(memories[0].steps) == 120


def replica(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        memory = DynamicMemory(4, 3, 6, BALL, window=8, k=1.0).double()
        for step in range(3):
            keys, values, losses = stream(BALL, 20 + 5 * rank, seed=10 * step + rank)
            memory.write(keys, values, losses)
        torch.save(memory.state_dict(), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_63_replicas_stay_equal(tmp_path):
    """Fault 63 on two gloo processes with batches of different sizes; slow because both import torch."""
    mp.spawn(replica, args=(tmp_path / "store", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int(first["steps"]) == 3 * 45 and int(first["size"]) > 1


def test_bad_input_is_named_and_writes_nothing():
    for wrong in ({"capacity": 0}, {"dim": 0}, {"window": 0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DynamicMemory(**({"dim": 4, "value_dim": 3, "capacity": 5} | wrong))
    for wrong in ({"threshold": "median"}, {"policy": "random"}, {"threshold": "base"}, {"base": 1.0}, {"k": -1.0}):
        with pytest.raises(ValueError):
            DynamicMemory(4, 3, 5, **wrong)
    memory = DynamicMemory(4, 3, 5, BALL, window=8, k=1.0).double()
    keys, values, losses = stream(BALL, 50)
    memory.write(keys, values, losses)
    before = copy.deepcopy(memory.state_dict())
    broken = losses.clone()
    broken[3] = math.nan
    for wrong in (
        (keys, values, broken),
        (keys * math.inf, values, losses),
        (keys[:, :3], values, losses),
        (keys, values[:, :2], losses),
        (keys[:4], values, losses),
        (keys, values, losses.unsqueeze(-1)),
    ):
        with pytest.raises(ValueError):
            memory.write(*wrong)
    with pytest.raises(TypeError, match="losses"):
        memory.write(keys, values, torch.zeros(50, dtype=torch.bool))
    with pytest.raises(ValueError, match="query"):
        memory.read(keys[:, :2])
    assert all(torch.equal(before[name], value) for name, value in memory.state_dict().items())
