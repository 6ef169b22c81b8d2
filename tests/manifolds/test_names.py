"""Spaces by name, products among them."""

import pytest

from horosphere import Euclidean, Lorentz, PoincareBall, Product, Sphere
from horosphere.embedding import GraphEmbedding
from horosphere.manifolds import dimension_of_name, manifold_by_name, register_manifold


@pytest.mark.parametrize(
    ("name", "kinds", "sizes"),
    [
        ("H5xS5", [Lorentz, Sphere], (6, 6)),
        ("(H2)^5", [Lorentz] * 5, (3,) * 5),
        ("(h2)^2 x E2 X (S2)^2", [Lorentz] * 2 + [Euclidean] + [Sphere] * 2, (3, 3, 2, 3, 3)),
        ("E1xE12", [Euclidean] * 2, (1, 12)),
    ],
)
def test_products(name, kinds, sizes):
    product = manifold_by_name(name)
    assert type(product) is Product and [type(part) for part in product.manifolds] == kinds and product.sizes == sizes
    dimension = dimension_of_name(name)
    assert product.ambient_dim(dimension) == sum(sizes)


@pytest.mark.parametrize(("name", "kind"), [("H10", Lorentz), ("S10", Sphere), ("E10", Euclidean), ("(H3)^1", Lorentz)])
def test_a_single_factor_is_that_space(name, kind):
    assert type(manifold_by_name(name)) is kind


def test_curvatures():
    assert [part.kappa for part in manifold_by_name("H2xE2xS2").manifolds] == [-1.0, 0.0, 1.0]
    assert manifold_by_name("H10", -2.0).kappa == -2.0 and manifold_by_name("sphere", 0.5).kappa == 0.5
    assert len(list(manifold_by_name("H2xE2xS2", learnable=True).parameters())) == 2
    assert len(list(manifold_by_name("poincare", -2.0, learnable=True).parameters())) == 1
    assert type(manifold_by_name("Poincare")) is PoincareBall
    with pytest.raises(ValueError, match="says nothing of a product"):
        manifold_by_name("H2xE2", -1.0)
    with pytest.raises(ValueError, match="flat space has kappa = 0"):
        manifold_by_name("E2", -1.0)
    with pytest.raises(ValueError, match="kappa"):
        manifold_by_name("H2", 1.0)


@pytest.mark.parametrize(
    "name", ["", "ball", "H", "H0", "H5x", "H5^2", "(H2)^0", "(H2", "H2yS2", "H2x(S2)^", "P5", None]
)
def test_any_other_name_is_refused(name):
    with pytest.raises(ValueError, match=r"unknown manifold .*poincare.*H5xS5"):
        manifold_by_name(name)


def test_the_error_shows_what_was_read():
    with pytest.raises(ValueError, match=r"'\(H2\)\^2xQ3'.*read H2xH2, then stopped at 'Q3'"):
        manifold_by_name("(H2)^2xQ3")


def test_dimensions():
    assert dimension_of_name("(H2)^2xE2x(S2)^2") == 10
    assert dimension_of_name("poincare") is None


class Own(Sphere):
    """A class of a user, with a name of its own."""


class Other(Sphere):
    pass


class Sized(Sphere):
    def __init__(self, width, depth=1):
        super().__init__()


@pytest.mark.parametrize("name", ["poincare", " Poincare ", "Sphere ", "H5", "h 5", "S3", "E2", "H2xS2", "(H2)^5 x E1"])
def test_names_of_the_library_are_refused(name):
    with pytest.raises(ValueError, match=r"is taken by Sphere|understood by the library itself, as the space"):
        register_manifold(name, Own)
    assert type(manifold_by_name(name)) is not Own


def test_own_names_in_any_case_and_with_blanks():
    register_manifold("Test names.Own", Own)
    register_manifold("Test names.Own", Own)  # again: the same class
    for name in ("Test names.Own", " test NAMES.own ", "testnames.own"):
        assert type(manifold_by_name(name)) is Own and dimension_of_name(name) is None
    with pytest.raises(ValueError, match=r"'testNAMES\.own' is taken by Own as 'Test names\.Own'"):
        register_manifold("testNAMES.own", Other)
    with pytest.raises(ValueError, match="takes no kappa here"):
        manifold_by_name("test names.own", 1.0)
    with pytest.raises(ValueError, match="takes no learnable here, got True"):
        manifold_by_name("test names.own", learnable=True)
    with pytest.raises(ValueError, match="empty"):
        register_manifold("  ", Own)


def test_blanks_and_class_names_of_ours():
    assert type(manifold_by_name(" Poincare ")) is PoincareBall
    assert manifold_by_name("PoincareBall", -2.0, learnable=True).kappa == -2.0
    assert type(manifold_by_name("H 5")) is Lorentz and dimension_of_name(" poincare") is None


def test_an_unknown_name_lists_own_names_and_suggests():
    register_manifold("test_names.listed", Own)
    with pytest.raises(ValueError, match=r"unknown manifold 'poincar', did you mean 'poincare'\?") as caught:
        manifold_by_name("poincar")
    assert "test_names.listed" in str(caught.value) and "horosphere.register_manifold(name, class)" in str(caught.value)
    with pytest.raises(ValueError, match=r"did you mean 'test_names\.listed'\?"):
        manifold_by_name("TEST_names.listd")


def test_a_class_that_needs_arguments_is_not_made_by_name():
    register_manifold("test_names.sized", Sized)
    for make in (
        lambda: manifold_by_name("test_names.sized"),
        lambda: GraphEmbedding("test_names.sized").fit([(0, 1)]),
    ):
        with pytest.raises(
            ValueError, match=r"names the class Sized, whose constructor needs width: .*Sized\(width=\.\.\.\)"
        ):
            make()
