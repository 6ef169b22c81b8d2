import pytest

import horosphere.data as data


def test_the_mammals_are_the_published_set():
    direct, closure = data.mammals(), data.mammals_closure()
    assert len(direct) == 1182 and len(closure) == 6540
    assert len({node for pair in direct for node in pair}) == 1182
    assert len({node for pair in closure for node in pair}) == 1180
    assert ("dog.n.01", "canine.n.02") in direct and ("dog.n.01", "mammal.n.01") in closure


def test_the_licence_travels_with_the_files():
    text = data.path("WORDNET-LICENSE.txt").read_text(encoding="utf-8")
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in text
    assert "THIS SOFTWARE AND DATABASE IS PROVIDED" in text


def test_an_unknown_file_is_named():
    with pytest.raises(ValueError, match=r"mammals\.tsv.*'birds'"):
        data.path("birds")
