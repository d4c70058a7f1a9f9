import pytest

from memlm.data.extract.html import extract_html, read_html
from memlm.data.extract.outcome import Unreadable


def text_of(body: str) -> str:
    return extract_html(f"<html><head><title>T</title></head><body>{body}</body></html>").text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<h2>A  b</h2><p>one<p>two", "## A b\n\none\n\ntwo\n"),
        ("<p>a<br>b<br/>c</p>", "a\nb\nc\n"),
        ("before<ul><li>one<li>two<ul><li>inner</ul><li><p>three</p><p>more</p></ul>after",
         "before\n\n- one\n- two\n  - inner\n- three\nmore\n\nafter\n"),
        ("<dl><dt>-b<dd>makes it<dt>-c<dd><p>one</p><p>two</p></dl>", "-b\nmakes it\n\n-c\none\n\ntwo\n"),
        ("<pre>a  b\n\n  # c</pre>", "```\na  b\n\n  # c\n```\n"),
        ("<pre>```\nx</pre>", "````\n```\nx\n````\n"),
        ("<table><tr><th>A<th>B<tr><td>1<td>2 <b>3</b></table>", "| A | B |\n| 1 | 2 3 |\n"),
        ("<table><tr><td><p>one</p><p>two</p><td>three</table>", "one\ntwo\nthree\n"),
        ("<table><tr><td><ul><li>one</ul><td><pre>x</pre></table>", "- one\n\n```\nx\n```\n"),
        ("<p># of items", "\\# of items\n"),
        ("2<sup>10</sup> bytes<sup><a href=#f>[1]</a></sup>", "2^10 bytes[1]\n"),
        ("a &lt;b&gt; &amp; c&nbsp;d &#x41;", "a <b> & c d A\n"),
        ("<p>a<script>if (a < b) x()</script><style>p {}</style><!-- c -->b</p>", "ab\n"),
        ("<h2><button>Question?</button></h2><button>Copy</button>answer", "## Question?\n\nanswer\n"),
        ("<p>x <b>bold</b>, <code>f()</code></p>", "x bold, f()\n"),
    ],
)  # fmt: skip
def test_markup_becomes_blocks(body, text):
    assert text_of(body) == text


@pytest.mark.parametrize(
    "around",
    [
        "<nav>N</nav>", "<div class='sphinxsidebar'>N</div>", "<div role=navigation>N</div>", "<ul class='toc'>N</ul>",
        "<div id=navbar>N</div>", "<header>N</header>", "<footer>N</footer>", "<aside>N</aside>",
        "<div style='display: none'>N</div>", "<a class=headerlink>N</a>", "<p hidden>N</p>", "<noscript>N</noscript>",
        "<div class=navheader><table><tr><td>N</table></div>",
    ],
)  # fmt: skip
def test_navigation_is_left_out(around):
    assert text_of(f"{around}<p>content") == "content\n"


def test_a_name_that_only_resembles_navigation_is_content():
    assert text_of("<div class='unrelated navigable'>one</div><section><aside>two</aside></section>") == "one\n\ntwo\n"


def test_the_part_that_is_called_main_is_the_page():
    page = "<div>around</div><main><header><h1>Name</h1><ul><li>tool</ul></header><p>the content</main>"
    assert extract_html(page) == ("# Name\n\nthe content\n", "Name")
    assert "much more" in text_of("<main>x</main>" + "<p>much more text</p>" * 9)


def test_a_page_of_links_is_its_text():
    assert text_of("<nav><ul><li>a<li>b</ul></nav>") == "- a\n- b\n"


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("<title>git-branch(1) - Git</title><h1>git-branch</h1>x", "git-branch"),
        ("<title>The  page</title><h1>one</h1><h1>two</h1>", "The page"),
        ("<title>The page</title>x<svg><title>circle</title></svg>", "The page"),
        ("x", ""),
    ],
)
def test_a_page_is_called_by_its_only_first_heading_or_its_title(page, title):
    assert extract_html(page).title == title


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("<meta charset=utf-8>é", "é\n"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1">é “x”', None),
        ('<?xml version="1.0" encoding="windows-1251"?>\n<html><body>привет</body></html>', None),
        ("<meta charset='shift_jis'>日本語", None),
        ("\ufeffé", "é\n"),
    ],
)
def test_a_page_is_read_in_the_encoding_that_it_names(data, text):
    encoding = {"iso": "cp1252", "win": "cp1251", "shi": "cp932"}.get(
        next((name[:3] for name in ("iso-8859-1", "windows-1251", "shift_jis") if name in data), ""), "utf-8"
    )
    expected = text or {"cp1252": "é “x”\n", "cp1251": "привет\n", "cp932": "日本語\n"}[encoding]
    assert read_html(data.encode(encoding)).text == expected


def test_a_page_without_text_is_named():
    with pytest.raises(Unreadable, match="has no text: a page of images or scripts"):
        extract_html("<html><body><img src=x><script>x</script></body></html>")


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 100_000 + "x",
        "<ul><li>" * 50_000 + "x",
        "<table><tr><td>" * 20_000 + "x",
        "<b>" * 100_000 + "x<p>" * 9,
    ],
)
def test_elements_within_one_another_without_end_are_read(page):
    assert "x" in extract_html(page).text
