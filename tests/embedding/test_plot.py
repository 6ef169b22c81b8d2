"""Pictures: the geometry of what is drawn, and that it is drawn."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from horosphere.embedding import GraphEmbedding, as_graph
from horosphere.embedding.plot import depths, figure_of, geodesics, great_circles, short_name, to_disk, to_globe
from horosphere.manifolds import Euclidean, Lorentz, PoincareBall, Sphere, Stereographic, convert

TREE = [(f"n{i}.n.01", f"n{(i - 1) // 3}.n.01") for i in range(1, 40)]


def random_ball(n, dimension, kappa):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, dimension))
    radius = np.tanh(rng.uniform(0.2, 3, (n, 1))) / np.sqrt(-kappa)
    return x / np.linalg.norm(x, axis=1, keepdims=True) * radius


def disk_distance(a, b):
    return 2 * np.arctanh(np.abs((a - b) / (1 - a.conj() * b)))


def test_two_dimensions_are_shown_as_they_are():
    x = random_ball(20, 2, -4.0)
    z = to_disk(x, PoincareBall(kappa=-4.0))
    want = 2.0 * PoincareBall(kappa=-4.0).dist(torch.from_numpy(x[0]), torch.from_numpy(x)).numpy()
    assert disk_distance(z[0], z) == pytest.approx(want, abs=1e-9)


def test_ball_and_hyperboloid_give_one_picture():
    x = random_ball(30, 4, -1.0)
    squared = np.sum(x**2, axis=1, keepdims=True)
    lorentz = np.concatenate([1 + squared, 2 * x], axis=1) / (1 - squared) / np.sqrt(3.0)
    assert to_disk(lorentz, Lorentz(kappa=-3.0)) == pytest.approx(to_disk(x, PoincareBall()), abs=1e-9)


def test_points_on_a_hyperbolic_plane_keep_their_distances():
    flat = random_ball(30, 2, -1.0)
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))
    x = flat @ turn[:2]
    z = to_disk(x, PoincareBall())
    want = PoincareBall().dist(torch.from_numpy(x[:1]), torch.from_numpy(x)).numpy()
    assert disk_distance(z[0], z) == pytest.approx(want, abs=1e-8)


@pytest.mark.parametrize("dimension", [2, 4])
@pytest.mark.parametrize("kappa", [-1.0, -3.0])
def test_any_node_can_be_the_centre(dimension, kappa):
    x = random_ball(30, dimension, kappa)
    manifold = PoincareBall(kappa=kappa)
    z = to_disk(x, manifold, centre=7)
    assert abs(z[7]) < 1e-12 and np.abs(z).max() < 1
    want = np.sqrt(-kappa) * manifold.dist(torch.from_numpy(x[7]), torch.from_numpy(x)).numpy()
    radius = 2 * np.arctanh(np.abs(z))
    if dimension == 2:
        assert radius == pytest.approx(want, abs=1e-9)
        assert disk_distance(z[0], z[1]) == pytest.approx(disk_distance(*to_disk(x, manifold)[:2]), abs=1e-9)
    else:
        assert (radius < want + 1e-9).all()  # a projection onto a plane through the centre brings points nearer
    lorentz = convert(torch.from_numpy(x), manifold, Lorentz(kappa)).numpy()
    assert to_disk(lorentz, Lorentz(kappa), centre=7) == pytest.approx(z, abs=1e-7)


def test_a_sphere_is_turned_not_bent():
    x = np.random.default_rng(0).normal(size=(20, 3))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for centre, front in ((None, unit.mean(0) / np.linalg.norm(unit.mean(0))), (4, unit[4])):
        globe = to_globe(3 * unit, centre)
        assert globe @ globe.T == pytest.approx(unit @ unit.T, abs=1e-12)
        assert np.linalg.det(globe[:3]) == pytest.approx(np.linalg.det(unit[:3]), abs=1e-12)
        assert globe[:, 2] == pytest.approx(unit @ front, abs=1e-12)
    assert to_globe(np.asarray([[0.0, 0.0, -1.0]]), 0) == pytest.approx(np.asarray([[0.0, 0.0, 1.0]]))


def test_great_circles_are_the_shortest_way():
    x = np.random.default_rng(0).normal(size=(12, 3))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x[5], x[6] = -x[11], x[10]  # antipodes, and a point twice
    arcs = great_circles(x[:6], x[[6, 7, 8, 9, 10, 11]])
    assert arcs[:, 0] == pytest.approx(x[:6], abs=1e-12) and arcs[:, -1] == pytest.approx(x[6:12], abs=1e-7)
    assert np.linalg.norm(arcs, axis=-1) == pytest.approx(np.ones(arcs.shape[:2]), abs=1e-12)
    length = np.linalg.norm(np.diff(arcs, axis=1), axis=-1).sum(1)
    assert length == pytest.approx(np.arccos(np.clip(np.sum(x[:6] * x[6:12], axis=1), -1, 1)), rel=1e-3)


def test_the_far_side_of_a_sphere_is_faint_and_has_no_names():
    graph = as_graph(TREE)
    points = np.random.default_rng(0).normal(size=(40, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    figure = figure_of(points, Sphere(), graph, centre=3)
    far_edges, far, near_edges, near = figure.axes[0].collections
    assert far_edges.get_alpha() < near_edges.get_alpha() and far.get_alpha() < 0.5
    behind = to_globe(points, 3)[:, 2] < 0
    assert (len(far.get_offsets()), len(near.get_offsets())) == (behind.sum(), 40 - behind.sum())
    names = {text.get_text() for text in figure.axes[0].texts}
    assert "n3" in names and not names & {f"n{graph.nodes[i][1:-5]}" for i in np.flatnonzero(behind)}


@pytest.mark.parametrize("manifold", [PoincareBall(), Euclidean(), Sphere()], ids=str)
def test_a_model_is_centred_by_the_name_of_a_node(manifold):
    model = GraphEmbedding(manifold, 2, n_epochs=3, random_state=0).fit(TREE)
    nodes = model.plot(centre="n7.n.01").axes[0].collections[-1].get_offsets()
    assert np.linalg.norm(nodes, axis=1).min() < 1e-12
    assert any(text.get_text() == "n7" for text in model.plot(centre="n7.n.01").axes[0].texts)
    with pytest.raises(ValueError, match=r"'n7\.n\.1' is not in the embedding; similar: n7\.n\.01"):
        model.plot(centre="n7.n.1")


def test_geodesics_are_circles_at_right_angles_to_the_boundary():
    z = random_ball(40, 2, -1.0) @ np.array([1, 1j])
    a, b = z[:20], z[20:]
    arcs = geodesics(a, b)
    arcs = arcs[..., 0] + 1j * arcs[..., 1]
    assert arcs[:, 0] == pytest.approx(a, abs=1e-12) and arcs[:, -1] == pytest.approx(b, abs=1e-9)
    steps = disk_distance(arcs[:, :-1], arcs[:, 1:])
    assert steps.sum(axis=1) == pytest.approx(disk_distance(a, b), rel=1e-6)
    # A circle with centre c and radius r meets the unit circle at right angles when |c|^2 = 1 + r^2.
    for start, arc in zip(a, arcs, strict=True):
        middle, end = arc[len(arc) // 2], arc[-1]
        rows = np.array([[p.real, p.imag] for p in (middle - start, end - start)])
        right = np.array([abs(middle) ** 2 - abs(start) ** 2, abs(end) ** 2 - abs(start) ** 2]) / 2
        centre = complex(*np.linalg.solve(rows, right))
        assert abs(centre) ** 2 == pytest.approx(1 + abs(centre - start) ** 2, rel=1e-6)


def test_coincident_ends_are_a_point():
    arc = geodesics(np.array([0.3 + 0.1j]), np.array([0.3 + 0.1j]))
    assert arc == pytest.approx(np.broadcast_to([0.3, 0.1], arc.shape))


def test_depth_counts_from_the_parents_that_are_no_children():
    graph = as_graph([("dog", "canine"), ("canine", "mammal"), ("cat", "mammal"), ("x", "y"), ("y", "x")])
    depth = dict(zip(graph.nodes, depths(graph, np.arange(len(graph.nodes))), strict=True))
    assert depth == {"dog": 2, "canine": 1, "mammal": 0, "cat": 1, "x": 0, "y": 1}


def test_synset_names_are_shortened():
    assert short_name("polar_bear.n.01") == "polar bear"
    assert short_name("3.14") == "3.14" and short_name(7) == "7"


@pytest.mark.parametrize(
    ("manifold", "dimension"),
    [
        (PoincareBall(), 2),
        (PoincareBall(kappa=-2.0), 5),
        (Lorentz(), 2),
        (Stereographic(kappa=-1.0), 2),
        (Euclidean(), 2),
    ],
)
def test_figure_holds_every_node_and_edge_and_labels_without_overlap(manifold, dimension):
    model = GraphEmbedding(manifold, dimension, closure=True, n_epochs=15, random_state=0).fit(TREE)
    figure = model.plot()
    (axes,) = figure.axes
    lines, nodes = axes.collections
    assert len(lines.get_segments()) == len(TREE) and len(nodes.get_offsets()) == 40
    texts = [text for text in axes.texts if not text.get_rotation()]
    boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in texts]
    assert axes.texts and all(text.get_text().startswith("n") and "." not in text.get_text() for text in axes.texts)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not model.plot(labels=False).axes[0].texts


@pytest.mark.parametrize(("manifold", "dimension"), [(Sphere(), 3), (Stereographic(kappa=1.0), 2), (PoincareBall(), 1)])
def test_what_has_no_picture_says_so(manifold, dimension):
    model = GraphEmbedding(manifold, dimension, n_epochs=1, random_state=0).fit(TREE)
    with pytest.raises(ValueError, match=r"pictures are drawn of|at least 2 dimensions|needs points of 2 dimensions"):
        model.plot()


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_files(tmp_path, ending):
    model = GraphEmbedding(n_epochs=1, random_state=0).fit([("[a]$x$", "<b>"), ("c_1", "<b>")])
    model.plot(tmp_path / f"p.{ending}")
    assert (tmp_path / f"p.{ending}").stat().st_size > 1000


def test_an_unknown_ending_is_named(tmp_path):
    model = GraphEmbedding(n_epochs=1, random_state=0).fit(TREE)
    with pytest.raises(ValueError, match=r"picture\.abc: the ending must name a picture format"):
        model.plot(tmp_path / "picture.abc")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "kappa", "message"),
    [
        ("ball", None, "needs an attribute kappa < 0"),
        ("hyperboloid", 1.0, "needs an attribute kappa < 0"),
        ("ball", torch.tensor(-0.1), None),
        ("flat", None, None),
        ("tangent", None, None),
        ("none", None, "pictures are drawn of"),
        ("disk", None, "must return one of 'flat', 'ball', 'hyperboloid', 'sphere', 'tangent', 'none', got 'disk'"),
    ],
)
def test_a_manifold_of_your_own_says_its_picture(kind, kappa, message):
    class Own(Euclidean):
        def picture(self):
            return kind

    manifold = Own()
    if kappa is not None:
        manifold.kappa = kappa
    points, graph = random_ball(40, 3, -1.0), as_graph(TREE)
    if message is None:
        assert figure_of(points, manifold, graph).axes
    else:
        with pytest.raises(ValueError, match=message):
            figure_of(points, manifold, graph)


def test_matplotlib_is_loaded_for_pictures_only():
    code = (
        "import sys; from horosphere.embedding import GraphEmbedding as G\n"
        "m = G(n_epochs=1, random_state=0).fit([('a', 'b'), ('c', 'b')])\n"
        "assert 'matplotlib' not in sys.modules\n"
        "m.plot()\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SPACES = [(PoincareBall(), 2), (PoincareBall(), 4), (Lorentz(), 3), (Lorentz(), 5), (Euclidean(), 2), (Euclidean(), 4)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("manifold", "stored"), [*SPACES, (Sphere(), 3)])
def test_a_point_that_is_not_finite_is_named(manifold, stored, bad):
    points = manifold.random(4, stored, dtype=torch.float64).numpy()
    points[2, -1] = bad
    with pytest.raises(ValueError, match=r"the point of 'c' is not finite \(one of 1\)"):
        figure_of(points, manifold, as_graph([("a", "b"), ("c", "d")]))


@pytest.mark.parametrize(
    ("manifold", "stored", "value"), [(Lorentz(), 5, 1e300), (Euclidean(), 2, 1.7e308), (Euclidean(), 4, 1.7e308)]
)
def test_a_point_that_overflows_in_the_projection_is_no_raw_error(manifold, stored, value):
    points = manifold.random(4, stored, dtype=torch.float64).numpy()
    points[2] = value
    with pytest.raises(ValueError, match=r"the point of .* too far out to be drawn"):
        figure_of(points, manifold, as_graph([("a", "b"), ("c", "d")]))
