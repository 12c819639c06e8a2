"""A card as a reader's browser shows it: its elements and its words; names that try to be markup."""

import html.parser
import re

import yaml
from hypothesis import strategies as st
from markdown_it import MarkdownIt


# What this package links to, by the beginnings of the addresses.
OURS = (
    *("https://d2l.ai", "https://arxiv.org/abs/", "https://huggingface.co/", "run_config.json", "metrics.json"),
    *("#make-it-again", "release.json"),
)
TABLE = {"table", "thead", "tbody", "tr", "th", "td"}
ELEMENTS = {"h1", "h2", "h3", "p", "a", "em", "strong", "code", "pre", "img", *TABLE}
COMMENTS = {" figures of d2l-bert evaluate ", " end of the figures "}

HOSTILE = (
    *("`", "``", "```", "~~~", "\n", "\n\n", "\r", "\t", " ", "|", "\\", "[", "]", "(", ")", "!", "<", ">", "&", "#"),
    *("*", "_", "$", "~~", "=", "+", "-", "@", "'", '"', ":", ";", "{{ 7 * 7 }}", "{% raw %}", "../", "/", "a", "é"),
    *("<img src=x onerror=alert(1)>", "![t](https://x.y/p.png)", "[l](https://x.y)", "<script>", "</table>", "&lt;"),
    *("](https://x.y)", "\n```\n", "\n---\n", "\n## Limits\n", "<!-- end of the figures -->", "-->", "https://x.y/z"),
    *("\n[MASK]: https://x.y\n", "[MASK]", "javascript:alert(1)", "\u202e", "\u2066", "\u200f", "\x1b[31m", "\x85"),
    *(
        "\U000e0041",
        "\u2028",
        "\0",
        "=cmd|'/C calc'!A0",
        "\N{ZERO WIDTH SPACE}",
        "語",
        "x" * 300,
        "<https://x.y>",
        "$$x$$",
        "1. ",
    ),
)
names = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=8).map("".join)


BLOCK = "\n\n\n"  # in the words of a page, where a block begins


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, its words, and its comments."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.comments, self.ended = [], [], [], []
        self.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.words.append(BLOCK if tag in ("p", "td", "th", "h1", "h2", "h3", "pre") else "")
        self.words.append(dict(attrs).get("alt", ""))

    def handle_data(self, data):
        self.words.append(data)

    def handle_comment(self, data):
        self.comments.append(data)

    def handle_endtag(self, tag):
        if tag in ("p", "td", "h1"):
            self.ended.append((tag, " ".join("".join(self.words).rpartition(BLOCK)[2].split())))

    def blocks(self, tag):
        """The words of all elements of a kind, in one line each."""
        return [words for kind, words in self.ended if kind == tag]

    @property
    def text(self):
        return "".join(self.words).replace(BLOCK, "\n")


def read_card(content):
    """The metadata of a card and its text, as the Hub divides them."""
    found = re.match(r"---\n(.*?)\n---\n(.*)", content, re.DOTALL)
    return yaml.safe_load(found[1]), found[2]


def page_of(content, pictures=()):
    """The page of a card, in which nothing may stand that this package does not write."""
    metadata, text = read_card(content)
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag in ELEMENTS, (tag, attributes)
        assert attributes.keys() <= {"a": {"href"}, "img": {"src", "alt"}, "code": {"class"}}.get(tag, {"style"})
        if tag == "a":
            assert attributes["href"].startswith(OURS), attributes
        if tag == "img":
            assert attributes["src"] in pictures, attributes
    assert set(page.comments) <= COMMENTS
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\x1b\x85]", content)
    return metadata, page
