"""The reader of WordNet's files: a made-up database by hand, and the counts of the real one where it is installed."""

from pathlib import Path

import pytest

from horosphere.data import mammals, wordnet_hypernyms

INSTALLED = [Path("/usr/share/wordnet"), Path("/usr/local/share/wordnet"), Path("/usr/local/WordNet-3.0/dict")]

# thing <- animal <- dog, hot_dog's second sense a dog too; Rex an instance of dog; "run" has two parents, one twice.
DATA = """\
  1 This software and database is made up for a test.
00000001 03 n 01 thing 0 000 | what is
00000002 05 n 02 Animal 0 beast 0 003 @ 00000001 n 0000 ~ 00000003 n 0000 + 00000009 v 0101 | lives | and moves
00000003 05 n 0b Dog 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 k 0 001 @ 00000002 n 0000 | eleven words
00000004 18 n 01 Rex 0 001 @i 00000003 n 0000 | an instance
00000005 05 n 01 dog 1 003 @ 00000001 n 0000 @ 00000003 n 0000 @ 00000001 n 0101 | the second sense
"""
INDEX = """\
  1 This software and database is made up for a test.
animal n 1 2 @ ~ 1 1 00000002
dog n 2 1 @ 2 1 00000003 00000005
rex n 1 1 @i 1 0 00000004
thing n 1 0 1 0 00000001
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data.noun").write_text(DATA)
    (tmp_path / "index.noun").write_text(INDEX)
    return tmp_path


DIRECT = [
    ("animal.n.01", "thing.n.01"),
    ("dog.n.01", "animal.n.01"),
    ("rex.n.01", "dog.n.01"),
    ("dog.n.02", "thing.n.01"),
    ("dog.n.02", "dog.n.01"),
]


def test_direct_pairs_and_names(folder):
    assert wordnet_hypernyms(folder) == DIRECT
    assert wordnet_hypernyms(str(folder), instances=False) == [pair for pair in DIRECT if pair[0] != "rex.n.01"]


def test_closure(folder):
    pairs = wordnet_hypernyms(folder, closure=True)
    assert len(pairs) == len(set(pairs))
    assert {parent for child, parent in pairs if child == "rex.n.01"} == {"dog.n.01", "animal.n.01", "thing.n.01"}
    assert [parent for child, parent in pairs if child == "dog.n.02"] == ["thing.n.01", "dog.n.01", "animal.n.01"]
    assert len(pairs) == 1 + 2 + 3 + 3


def test_a_cycle_ends_and_gives_no_self_loop(folder):
    (folder / "data.noun").write_text(DATA.replace("thing 0 000", "thing 0 001 @ 00000003 n 0000"))
    pairs = wordnet_hypernyms(folder, closure=True)
    cycle = ["thing.n.01", "animal.n.01", "dog.n.01"]
    assert {(a, b) for a in cycle for b in cycle if a != b} == {pair for pair in pairs if pair[0] in cycle}


def test_verbs_have_their_own_files(folder):
    (folder / "data.verb").write_text(
        "00000001 29 v 01 move 0 000 01 + 02 00 | go\n"
        "00000002 29 v 01 run 0 001 @ 00000001 v 0000 02 + 02 00 + 22 00 | fast\n"
    )
    (folder / "index.verb").write_text("move v 1 0 1 1 00000001\nrun v 1 1 @ 1 1 00000002\n")
    assert wordnet_hypernyms(folder, "verb") == [("run.v.01", "move.v.01")]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("data.noun", "001 @i 00000003", "002 @i 00000003", r"data\.noun, line 5: not a line of a WordNet"),
        ("data.noun", "n 01 Rex", "n zz Rex", r"data\.noun, line 5: not a line"),
        ("data.noun", "@i 00000003", "@i 00000007", r"rex\.n\.01 points to 00000007, which"),
        ("index.noun", "rex n", "max n", r"line 5: 'rex' has no sense 00000004 in index\.noun"),
        ("index.noun", "rex n", "rex v", r"index\.noun, line 4: not a line of a WordNet"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(folder, name, old, new, message):
    content = (folder / name).read_text()
    assert old in content
    (folder / name).write_text(content.replace(old, new))
    with pytest.raises(ValueError, match=message):
        wordnet_hypernyms(folder)


def test_what_is_not_there(folder):
    with pytest.raises(FileNotFoundError, match=r"data\.verb|index\.verb.*wordnet-base"):
        wordnet_hypernyms(folder, "verb")
    with pytest.raises(ValueError, match=r'"noun" or "verb".*adj'):
        wordnet_hypernyms(folder, "adj")


def test_the_whole_of_wordnet():
    folder = next((path for path in INSTALLED if (path / "data.noun").exists()), None)
    if folder is None:
        pytest.skip("no WordNet database here: Debian's package wordnet-base has it")
    direct, closure = wordnet_hypernyms(folder), wordnet_hypernyms(folder, closure=True)
    assert (len(direct), len(set(direct))) == (84_427, 84_427)
    assert len({name for pair in direct for name in pair}) == 82_115
    assert {parent for _, parent in direct} - {child for child, _ in direct} == {"entity.n.01"}
    assert (len(closure), len(set(closure))) == (743_241, 743_241)
    assert set(direct) <= set(closure)
    below = {child for child, parent in closure if parent == "mammal.n.01"} | {"mammal.n.01"}
    assert set(mammals()) == {pair for pair in direct if set(pair) <= below}
