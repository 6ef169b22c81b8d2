"""GeodesicAttention beside nn.MultiheadAttention, and what it has beyond it."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import horosphere as hs
from horosphere.attention import GeodesicAttention, TransformerBlock, into_manifold
from horosphere.attention.functional import geodesic_attention
from horosphere.manifolds._geoopt import geoopt

F64 = torch.float64
SPACES = {
    "flat": lambda: hs.Euclidean(),
    "ball": lambda: hs.PoincareBall(-0.7),
    "sphere": lambda: hs.Sphere(0.5),
    "hyperboloid": lambda: hs.Lorentz(-1.3),
    "product": lambda: hs.Product((hs.PoincareBall(), 2), (hs.Lorentz(), 3), (hs.Sphere(), 2)),
    "geoopt": lambda: geoopt.PoincareBall(c=1.0),
}


def normal(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer(manifold=None, embed=12, heads=2, seed=0, **kwargs):
    torch.manual_seed(seed)
    kwargs.setdefault("dtype", F64)
    made = GeodesicAttention(embed, heads, manifold=manifold or hs.PoincareBall(), **kwargs)
    for bias in (made.in_proj_bias, made.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return made


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


CALLS = {
    "self": {},
    "cross": {"cross": True},
    "sizes": {"cross": True, "kdim": 5, "vdim": 7},
    "no bias": {"bias": False},
    "unbatched": {"unbatched": True},
    "unbatched masks": {"unbatched": True, "padding": "bool", "mask": "heads"},
    "padding": {"padding": "bool"},
    "float padding": {"padding": "float", "cross": True},
    "mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "mask by head": {"mask": "heads", "padding": "bool"},
    "both kinds": {"mask": "float", "padding": "float"},
    "weights of heads": {"average_attn_weights": False, "mask": "bool"},
    "no weights": {"need_weights": False, "padding": "bool"},
}


def call(name, b=3, n=5, m=4, embed=12, heads=2):
    """Constructor and forward arguments of one case, and the same for both layers."""
    case = dict(CALLS[name])
    cross, unbatched = case.pop("cross", False), case.pop("unbatched", False)
    made = {key: case.pop(key) for key in ("kdim", "vdim", "bias") if key in case}
    m = m if cross else n
    b = 1 if unbatched else b
    query = normal(b, n, embed)
    key = normal(b, m, made.get("kdim", embed), seed=1) if cross else query
    value = normal(b, m, made.get("vdim", embed), seed=2) if cross else query
    blocked = torch.rand(b * heads, n, m, generator=torch.Generator().manual_seed(3)) < 0.4
    blocked[..., 0] = False  # torch gives NaN where everything is masked
    mask, padding = case.pop("mask", None), case.pop("padding", None)
    if mask is not None:
        case["attn_mask"] = blocked if mask == "heads" else blocked[0]
        if mask == "float":
            case["attn_mask"] = normal(n, m, seed=4)
    if padding is not None:
        case["key_padding_mask"] = torch.arange(m) >= torch.tensor([[m - 1], [m], [2]])[:b]
        if padding == "float":
            case["key_padding_mask"] = normal(b, m, seed=5)
    if unbatched:
        query, key, value = query[0], key[0], value[0]
        if padding is not None:
            case["key_padding_mask"] = case["key_padding_mask"][0]
    if not cross:
        key = value = query
    return made, (query, key, value), case


@pytest.mark.parametrize("name", CALLS)
def test_with_dot_products_it_is_torchs_layer(name):
    made, tokens, case = call(name)
    theirs = nn.MultiheadAttention(12, 2, batch_first=True, dtype=F64, **made)
    ours = layer(weight="dot", **made)
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("proj" not in key for key in missing.missing_keys)
    for bias in (theirs.in_proj_bias, ours.in_proj_bias):
        if bias is not None:
            nn.init.ones_(bias)
    found, right = ours(*tokens, **case), theirs(*tokens, **case)
    close(found[0], right[0])
    assert (found[1] is None) == (right[1] is None)
    if right[1] is not None:
        close(found[1], right[1])


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", ["self", "sizes", "unbatched masks", "both kinds", "mask by head"])
def test_the_output_is_the_weights_times_the_values(space, name):
    """And the weights are those of the formula, head by head, from hs.cdist."""
    made, tokens, case = call(name)
    ours = layer(SPACES[space](), eps=torch.tensor([0.3, 0.02]), **made)
    out, weights = ours(*tokens, **(case | {"average_attn_weights": False}))
    q, k, v = ours._heads(*tokens, None)
    scores = -(hs.cdist(q, k, ours.manifold, squared=True) + ours.eps[:, None, None]).log()
    for mask, shape in (("attn_mask", None), ("key_padding_mask", (-1, 1, 1, k.shape[2]))):
        if (given := case.get(mask)) is not None:
            given = given.view(shape) if shape else given.unflatten(0, (-1, 2)) if given.dim() == 3 else given
            scores = scores.masked_fill(given, -math.inf) if given.dtype == torch.bool else scores + given
    right = scores.softmax(-1)
    close(weights, right.squeeze(0) if tokens[0].dim() == 2 else right, 1e-10)
    joined = ours.out_proj((right @ v).transpose(1, 2).flatten(-2))
    close(out, joined.squeeze(0) if tokens[0].dim() == 2 else joined, 1e-10)


def test_both_meanings_of_a_mask_side_by_side():
    """The function: True takes part. The layer, as nn.MultiheadAttention: True blocks."""
    ours = layer(hs.Sphere(), embed=4, heads=1)
    with torch.no_grad():
        ours.in_proj_weight.copy_(torch.eye(4, dtype=F64).repeat(3, 1))
        ours.out_proj.weight.copy_(torch.eye(4, dtype=F64))
        ours.in_proj_bias.zero_(), ours.out_proj.bias.zero_()
    x = normal(1, 3, 4)
    mask = torch.tensor([[True, False, False]] * 3)
    points = hs.Sphere().projx(x)[:, None]
    function = geodesic_attention(points, points, x[:, None], hs.Sphere(), attn_mask=mask)
    close(function[0, 0], x[0, :1].expand(3, 4))  # only key 0 takes part
    blocked, weights = ours(x, x, x, attn_mask=mask)
    assert bool((weights[0, :, 0] == 0).all()) and bool((weights[0, :, 1:] > 0).all())  # only key 0 is blocked
    padded, _ = ours(x, x, x, key_padding_mask=mask[:1])
    close(padded, blocked)
    allowed, _ = ours(x, x, x, attn_mask=~mask)
    close(allowed[0], function[0, 0])


def test_causal_without_a_mask_and_on_top_of_one():
    ours = layer()
    x = normal(2, 6, 12)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    right, weights = ours(x, x, x, attn_mask=causal)
    found, found_weights = ours(x, x, x, is_causal=True)
    close(found, right)
    close(found_weights, weights)
    hint, _ = ours(x, x, x, attn_mask=causal, is_causal=True)
    close(hint, right)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    both, _ = ours(x, x, x, padding, attn_mask=causal)
    close(ours(x, x, x, padding, is_causal=True)[0], both)
    with_floats, _ = ours(x, x, x, torch.zeros(2, 6, dtype=F64).masked_fill(padding, -math.inf), is_causal=True)
    close(with_floats, both)


def test_a_query_without_keys_gets_zero():
    ours = layer()
    x = normal(2, 3, 12).requires_grad_()
    out, weights = ours(x, x, x, torch.tensor([[True] * 3, [False] * 3]))
    close(out[0], ours.out_proj.bias.expand(3, 12))
    assert not weights[0].any()
    out.sum().backward()
    assert x.grad.isfinite().all() and not x.grad[0].any()


def test_grouped_heads_equal_repeated_ones():
    grouped = layer(embed=16, heads=4, num_kv_heads=2, kdim=5, vdim=6)
    full = layer(embed=16, heads=4, kdim=5, vdim=6)
    state = grouped.state_dict()
    for name in ("k_proj_weight", "v_proj_weight"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    q, k, v = state["in_proj_bias"].split((16, 8, 8))
    k, v = (t.view(2, 4).repeat_interleave(2, 0).flatten() for t in (k, v))
    state["in_proj_bias"] = torch.cat((q, k, v))
    full.load_state_dict(state)
    tokens = normal(2, 5, 16), normal(2, 7, 5, seed=1), normal(2, 7, 6, seed=2)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    for found, right in zip(grouped(*tokens, padding), full(*tokens, padding), strict=True):
        close(found, right)


def test_grouped_heads_under_a_curvature_of_every_head():
    kappa = torch.tensor([-0.5, -1.0, -1.5, -2.0], dtype=F64)
    ours = layer(hs.PoincareBall(kappa, learnable=True), embed=16, heads=4, num_kv_heads=2)
    x = normal(2, 5, 16)
    _, weights = ours(x, x, x, average_attn_weights=False)
    for h in range(4):
        one = layer(hs.PoincareBall(kappa[h].item()), embed=16, heads=4, num_kv_heads=2)
        one.load_state_dict(ours.state_dict(), strict=False)
        close(one(x, x, x, average_attn_weights=False)[1][:, h], weights[:, h], 1e-10)
    ours(x, x, x)[0].square().sum().backward()
    assert bool((ours.manifold.kappa.grad != 0).all())


@pytest.mark.parametrize("space", ["ball", "product", "hyperboloid"])
def test_gradients_of_every_parameter(space):
    """Against finite differences: projections, log eps, and the curvature of every head."""
    manifold = SPACES[space]()
    if space == "ball":
        manifold = hs.PoincareBall(torch.tensor([-0.6, -1.4], dtype=F64), learnable=True)
    ours = layer(manifold, rotary=100.0 if space != "product" else None)
    x = normal(1, 3, 12)
    names = [name for name, _ in ours.named_parameters()]
    assert "log_eps" in names and (space != "ball" or "manifold._learnable_kappa" in names)

    def loss(*values):
        state = dict(zip(names, values, strict=True))
        return (
            torch.func.functional_call(ours, state, (x, x, x), {"need_weights": False, "is_causal": True})[0]
            .sin()
            .sum()
        )

    values = tuple(p.detach().requires_grad_() for p in ours.parameters())
    found = torch.autograd.grad(loss(*values), values)
    for i, name in enumerate(names):
        step = 1e-6 * normal(*values[i].shape, seed=7)
        moved = [[*values[:i], values[i] + sign * step, *values[i + 1 :]] for sign in (1, -1)]
        with torch.no_grad():
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2
        close((found[i] * step).sum(), slope, 1e-11)
        assert slope != 0 or name == "in_proj_bias"


@pytest.mark.parametrize("space", ["flat", "ball", "sphere", "hyperboloid"])
def test_only_differences_of_positions_count(space):
    ours = layer(SPACES[space](), rotary=100.0)
    x = normal(1, 6, 12)
    twice = torch.cat((x, x), 1)
    scores = ours(twice, twice, twice, average_attn_weights=False)[1].log()
    early, late = scores[..., :6, :6], scores[..., 6:, 6:]
    close(early - early[..., :1], late - late[..., :1], 1e-9)
    still = layer(SPACES[space]())
    assert (still(x, x, x)[1] - ours(x, x, x)[1]).abs().max() > 1e-3


def test_calibrated_eps_is_a_hundredth_of_the_mean_squared_distance(monkeypatch):
    ours = layer(hs.PoincareBall(), num_kv_heads=1)
    x = normal(2, 7, 12)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    q, k, _ = ours._heads(x, x, x, None)
    d2 = hs.cdist(q, k.expand(-1, 2, -1, -1), ours.manifold, squared=True)
    allowed = (~padding[:, None, None]).expand_as(d2).tril()
    for pairs in (2**22, 30):  # in one block, and row by row
        monkeypatch.setattr("horosphere.attention.calibration.PAIRS", pairs)
        assert ours.calibrate_eps_(x, key_padding_mask=padding, is_causal=True) is ours
        right = 0.01 * torch.stack([d2[:, h][allowed[:, h]].mean() for h in range(2)])
        close(ours.eps, right, 1e-10)
    mask = torch.zeros(7, 7, dtype=F64).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    ours.calibrate_eps_(x, key_padding_mask=padding, attn_mask=mask, fraction=0.02)
    close(ours.eps, 2 * right, 1e-10)
    sums = []
    ours.calibrate_eps_(x, all_reduce=lambda t: (sums.append(t.clone()), t[0].mul_(3)))
    close(ours.eps, 0.03 * sums[0][0] / sums[0][1], 1e-10)
    before = ours.eps.clone()
    with pytest.raises(ValueError, match="no unmasked pair"):
        ours.calibrate_eps_(x, key_padding_mask=torch.ones(2, 7, dtype=torch.bool))
    assert torch.equal(before, ours.eps)
    with pytest.raises(ValueError, match="no eps to calibrate"):
        layer(weight="dot").calibrate_eps_(x)


def test_dropout_only_in_training():
    ours = layer(dropout=0.5)
    x = normal(1, 40, 12)
    ours.eval()
    right = ours(x, x, x, need_weights=False)[0]
    assert torch.equal(right, ours(x, x, x, need_weights=False)[0])
    ours.train()
    torch.manual_seed(0)
    many = ours(*[x.expand(400, -1, -1)] * 3, need_weights=False)[0]
    assert (many[0] - right[0]).abs().max() > 1e-2
    assert (many.mean(0) - right[0]).abs().max() < 0.2 * many.std(0).max()


def test_into_manifold_stays_within_its_radius():
    x = torch.cat((normal(50, 6), 1e4 * normal(50, 6, seed=1), torch.zeros(1, 6, dtype=F64)))
    for kappa in (-0.3, -2.0):
        for manifold in (hs.PoincareBall(kappa), hs.Lorentz(kappa), hs.Stereographic(kappa)):
            radius = manifold.dist0(into_manifold(x, manifold, max_radius=3.0))
            length = x.norm(dim=-1) / 6**0.5
            close(radius, 3 / abs(kappa) ** 0.5 * torch.tanh(length * abs(kappa) ** 0.5 / 3), 1e-9)
    close(into_manifold(x, hs.Euclidean()), x / 6**0.5)
    close(into_manifold(x[:100], hs.Sphere(4.0)), 0.5 * nn.functional.normalize(x[:100], dim=-1))
    bounded = into_manifold(x, hs.PoincareBall(), max_radius=torch.linspace(0.1, 5, 101, dtype=F64)[:, None])
    assert bool((hs.PoincareBall().dist0(bounded) <= torch.linspace(0.1, 5, 101, dtype=F64) + 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["ball", "sphere", "hyperboloid", "projected sphere"])
def test_into_manifold_gives_points_of_every_type(name, dtype):
    """Far beyond what the type can hold, and at 0: points all the same, and near those of float64."""
    manifold = hs.Stereographic(0.5) if name == "projected sphere" else SPACES[name]()
    x = torch.cat((normal(50, 6), torch.zeros(1, 6, dtype=F64))).to(dtype)
    for factor, radius in ((1.0, 4.0), (1e4, 60.0)):
        points = into_manifold(factor * x, manifold, max_radius=radius)
        assert points.dtype == dtype
        assert manifold.check_point_on_manifold(points.float(), atol=4 * torch.finfo(dtype).eps)
    right = into_manifold(x.double(), manifold)
    assert manifold.dist(into_manifold(x, manifold).double(), right).max() < 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["ball", "sphere", "hyperboloid", "projected sphere"])
def test_into_manifold_has_gradients_at_zero_too(name):
    manifold = hs.Stereographic(0.5) if name == "projected sphere" else SPACES[name]()
    x = normal(4, 6)
    if name != "sphere":  # whose direction at 0 is a choice
        x[0] = 0
    assert torch.autograd.gradcheck(lambda x: into_manifold(x, manifold), x.requires_grad_())
    kappa = torch.tensor(manifold.kappa, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda kappa: into_manifold(x.detach(), type(manifold)(kappa)), kappa)


def test_into_manifold_through_flat_space_is_smooth():
    kappa = torch.tensor(0.0, dtype=F64)
    at = [into_manifold(normal(3, 4), hs.Stereographic(kappa + step)) for step in (-1e-6, 0.0, 1e-6)]
    close(at[1], normal(3, 4) / 4)
    close((at[2] - at[1]) / 1e-6, (at[1] - at[0]) / 1e-6 * 1.0, 0.1)


def test_parts_of_a_product_are_mapped_by_themselves():
    inner = hs.Product((hs.Lorentz(), 3), (hs.Sphere(), 4))
    product = hs.Product((hs.Scaled(hs.PoincareBall(), 2.0), 2), (inner, 7))
    x = normal(5, 8)
    right = torch.cat(
        (
            into_manifold(x[:, :2], hs.PoincareBall()),
            into_manifold(x[:, 2:4], hs.Lorentz()),
            into_manifold(x[:, 4:], hs.Sphere()),
        ),
        -1,
    )
    close(into_manifold(x, product), right)
    with pytest.raises(ValueError, match="takes 8 free numbers"):
        into_manifold(normal(5, 9), product)


class Snowflake(geoopt.Euclidean):
    """Level 0: |x - y|^(1/2)."""

    def dist(self, x, y, *, keepdim=False):
        return torch.linalg.vector_norm(x - y, dim=-1, keepdim=keepdim) ** 0.5


def test_a_manifold_with_dist_alone():
    manifold = Snowflake(ndim=1)
    assert hs.chord_of(manifold, torch.zeros(2, 3)) is None
    ours = layer(manifold, num_kv_heads=1)
    x = normal(2, 5, 12)
    _, weights = ours(x, x, x, is_causal=True, average_attn_weights=False)
    q, k, _ = ours._heads(x, x, x, None)
    right = 1 / ((q[:, :, :, None] - k[:, :, None]).norm(dim=-1) + ours.eps[:, None, None])
    right = right.tril() / right.tril().sum(-1, keepdim=True)
    close(weights, right, 1e-10)
    ours.calibrate_eps_(x)
    cache = ours.new_cache()
    with torch.no_grad():
        steps = [ours(*[x[:, t : t + 1]] * 3, cache=cache)[0] for t in range(5)]
        close(torch.cat(steps, 1), ours(x, x, x, is_causal=True)[0], 1e-10)


def test_copies_keep_everything():
    ours = layer(hs.PoincareBall(torch.tensor([-0.5, -2.0]), learnable=True), rotary=100.0, eps=0.3)
    block = TransformerBlock(ours)
    x = normal(2, 5, 12)
    right = block(x, is_causal=True)
    buffer = io.BytesIO()
    torch.save(block.state_dict(), buffer)
    buffer.seek(0)
    other = TransformerBlock(layer(hs.PoincareBall(torch.tensor([-1.0, -1.0]), learnable=True), rotary=100.0, seed=9))
    other.load_state_dict(torch.load(buffer))
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), other):
        close(copied(x, is_causal=True), right)
        copied.attention.manifold.kappa.data.mul_(2)
    close(block(x, is_causal=True), right)


def test_inside_torchs_encoder_layer():
    """Its fused path for inference would compute a softmax with our weights."""
    encoder = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, dtype=F64)
    encoder.self_attn = layer(hs.Sphere())
    x = normal(2, 5, 12)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    right = encoder(x, src_key_padding_mask=padding)
    attended, _ = encoder.self_attn(x, x, x, padding)
    close(right, encoder.norm2((y := encoder.norm1(x + attended)) + encoder._ff_block(y)))
    encoder.eval()
    with torch.inference_mode():
        close(encoder(x, src_key_padding_mask=padding), right)


def test_half_and_autocast():
    ours = layer(hs.PoincareBall(), embed=16, dtype=torch.float32)
    x = normal(2, 5, 16, dtype=torch.float32)
    right = ours(x, x, x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found, weights = ours(x, x, x)
    assert found.dtype == torch.bfloat16 and (found.float() - right).abs().max() < 0.05
    assert weights.dtype == torch.float32
    found.float().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in ours.parameters())
    half = copy.deepcopy(ours).to(torch.bfloat16)
    found = half(x.bfloat16(), x.bfloat16(), x.bfloat16())[0]
    assert found.dtype == torch.bfloat16 and (found.float() - right).abs().max() < 0.1


@pytest.mark.parametrize(
    "made, message",
    [
        ({"embed_dim": 10, "num_heads": 4}, "multiple of num_heads"),
        ({"num_kv_heads": 3, "num_heads": 4}, "multiple of num_kv_heads"),
        ({"batch_first": False}, "batch_first"),
        ({"pattern": "sparse"}, "pattern must be one of"),
        ({"dropout": 1.5}, "dropout"),
        ({"eps": -1.0}, "eps must be positive"),
        ({"eps": torch.ones(3)}, "eps must be positive, one number or one for each"),
        ({"max_radius": 0.0}, "max_radius"),
        ({"rotary": 10.0, "embed_dim": 6, "num_heads": 2}, "turn pairs"),
        ({"manifold": hs.Product((hs.Sphere(), 3), (hs.Lorentz(), 3))}, "takes 5 free numbers"),
        ({"manifold": geoopt.Euclidean(ndim=2)}, "ndim 2"),
    ],
)
def test_constructor_refuses(made, message):
    given = {"embed_dim": 12, "num_heads": 2, "manifold": hs.PoincareBall()} | made
    with pytest.raises(ValueError, match=message):
        GeodesicAttention(**given)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda a, x: a(x, x[0], x[0]), "must be"),
        (lambda a, x: a(x, x[:1], x[:1]), "must be"),
        (lambda a, x: a(x, x, x[:, :2]), "must be"),
        (lambda a, x: a(x[..., :3], x, x), "sizes E, kdim, vdim"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(3, 5, 5, dtype=torch.bool)), "attn_mask must have shape"),
        (lambda a, x: a(x, x, x, torch.ones(5, dtype=torch.bool)), "key_padding_mask must have shape"),
        (lambda a, x: a(x, x, x, torch.ones(2, 5, dtype=torch.int64)), "must be bool"),
        (lambda a, x: a(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool), cache=a.new_cache()), "no attn_mask"),
        (lambda a, x: a(x, x, x, torch.ones(2, 5), cache=a.new_cache()), "must be bool"),
    ],
)
def test_forward_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(layer(), normal(2, 5, 12))
