"""The strict reader: what it accepts, and that each thing it refuses is named by file, line and content."""

import gzip

import pytest

from horosphere.embedding import GraphEmbedding, as_graph, read_edge_list


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "edges.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("content", "edges"),
    [
        ("a\tb\nb\tc\n", [("a", "b"), ("b", "c")]),
        ("a,b\nb,c", [("a", "b"), ("b", "c")]),
        ("a b\nb   c\n", [("a", "b"), ("b", "c")]),
        ("a\tb\t2\nb\tc\t0.5\n", [("a", "b", 2.0), ("b", "c", 0.5)]),
        ("a,b,2\r\nb,c,1e3\r\n", [("a", "b", 2.0), ("b", "c", 1000.0)]),
        ("New York\tUSA\nSan Jose\tUSA\n", [("New York", "USA"), ("San Jose", "USA")]),
        ('"Paris, TX",USA\nParis,"France"\n', [("Paris, TX", "USA"), ("Paris", "France")]),
        ('"New York" USA\n', [("New York", "USA")]),
        ('"say ""hi""",b\n', [('say "hi"', "b")]),
        ("a , b\nb, c\n", [("a", "b"), ("b", "c")]),
        ("x,1 y\nz y\n", [("x,1", "y"), ("z", "y")]),
        ("# note\na\tb\n\n  \nb\tc#d\n", [("a", "b"), ("b", "c#d")]),
        ("\ufeffa\tb\n", [("a", "b")]),
        ("0 1\n1 2\n", [("0", "1"), ("1", "2")]),
        ("naïve\t日本\n🙂\tnaïve\n", [("naïve", "日本"), ("🙂", "naïve")]),
        ("a\x0cb\tc\x85\u2028d\n", [("a\x0cb", "c\x85\u2028d")]),
        ("a b\n\n10 20\n", [("a", "b"), ("10", "20")]),
        ("a b\nc d\ne f\n", [("a", "b"), ("c", "d"), ("e", "f")]),
        ("a b\nc d\nd e\nf g\n", [("a", "b"), ("c", "d"), ("d", "e"), ("f", "g")]),
    ],
)
def test_reads(write, content, edges):
    assert read_edge_list(write(content)) == edges


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"edges\.txt: no edges in this file"),
        ("# only a comment\n\n", r"edges\.txt: no edges in this file"),
        ("a\tb\nc\n", r"edges\.txt, line 2: 'c' has 1 column"),
        ("a\nb\nc\n", r"line 1: 'a' has 1 column; expected 2"),
        ("a\tb\nc\td\te\n", r"line 2: 'c\\td\\te' has 3 columns where the first edge has 2"),
        ("a,b,c\nd,e,f\n", r"line 1: 'a,b,c' has 'c' in its third column, which must be a weight"),
        ("a,b,c,d\n", r"line 1: 'a,b,c,d' has 4 columns"),
        ("a\tb\t1\nc\td\tnan\n", r"line 2: .* has the weight nan; a weight must be finite and positive"),
        ("a\tb\t1\nc\td\tinf\n", r"line 2: .* weight inf"),
        ("a\tb\t-1\n", r"line 1: .* weight -1"),
        ("a\tb\t0\n", r"line 1: .* weight 0"),
        ("a\tb\t1\nc\td\t\n", r"line 2: .* has '' in its third column"),
        ("a,b\n,c\n", r"line 2: ',c' has an empty label"),
        ('a,b\n"c,d\n', r"line 2: '\"c,d' cannot be read as quoted columns"),
        (b"a\tb\nc\t\xff\xfe\n", r"line 2: .* is not UTF-8"),
        (b"a\tb\nc\t\x00\n", r"line 2: holds a NUL character"),
    ],
)
def test_refuses(write, content, message):
    with pytest.raises(ValueError, match=message):
        read_edge_list(write(content))


@pytest.mark.parametrize(
    "content",
    [
        "id1,id2,weight\na,b,1\n",
        "child\tparent\na\tb\n",
        "Source Target\n1 2\n",
        "first,second\n1,2\n2,3\n",
        "employee,manager\nann,bob\ncarl,bob\n",
        "Mitarbeiter;x Chef\nann bob\nbob carl\ndan carl\n",
    ],
)
def test_a_header_is_an_error_until_the_user_decides(write, content):
    with pytest.raises(ValueError, match=r"line 1: .* looks like a header .*read_edge_list.*header=True.*header=False"):
        read_edge_list(write(content))
    with pytest.raises(ValueError, match="looks like a header"):
        GraphEmbedding(n_epochs=1).fit(write(content))
    assert len(read_edge_list(write(content), header=True)) == content.count("\n") - 1
    if "weight" not in content:
        assert len(read_edge_list(write(content), header=False)) == content.count("\n")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("child,child\na,b\n", "child"),
        ("ann,ann\ncarl,bob\ndan,bob\n", "ann"),
        ("source,target,target\na,b,2\n", "target"),
    ],
)
def test_a_name_that_two_columns_have_is_named(write, content, name):
    with pytest.raises(ValueError, match=f"looks like a header .*, and two columns are called '{name}'"):
        read_edge_list(write(content))


def test_a_self_loop_in_line_1_is_an_edge(write):
    assert len(read_edge_list(write("child\tchild\nchild\tdog\n"))) == 2
    assert len(read_edge_list(write("a\ta\nb\tc\n"))) == 2


def test_a_file_that_is_not_there_is_named(tmp_path):
    for read in (read_edge_list, as_graph, GraphEmbedding().fit):
        with pytest.raises(FileNotFoundError, match=r"^\S*missing\.tsv: No such file or directory$"):
            read(str(tmp_path / "missing.tsv"))


def test_names_of_columns_that_are_also_nodes_are_no_header(write):
    assert len(read_edge_list(write("child\tparent\nparent\tperson\n"))) == 2


def test_a_file_of_a_header_alone_has_no_edges(write):
    with pytest.raises(ValueError, match="no edges"):
        read_edge_list(write("child\tparent\n"), header=True)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_edge_list(tmp_path / "none.tsv")


@pytest.mark.parametrize("name", ["edges.tsv.gz", "edges.tsv"])
def test_gzip_is_told_by_its_content(write, name):
    text = "\ufeffa\tb\r\nb\tnaïve\n"
    assert read_edge_list(write(gzip.compress(text.encode()), name)) == [("a", "b"), ("b", "naïve")]
    assert read_edge_list(write(text, "plain.gz")) == [("a", "b"), ("b", "naïve")]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:3], lambda data: data[:-6] + b"\0" * 6])
def test_a_damaged_gzip_file_is_named(write, damage):
    with pytest.raises(ValueError, match=r"edges\.txt is a damaged gzip file"):
        read_edge_list(write(damage(gzip.compress(b"a\tb\nb\tc\n"))))
