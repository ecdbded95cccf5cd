"""Hooks of the documentation site."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to files outside docs/ by their text, since the site does not have these files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Remove roles and double colons of reStructuredText in docstrings, which Markdown does not render."""
    return re.sub(r":(?:func|meth|class|attr):(?=<code>)|:(?=:</p>)", "", html)
