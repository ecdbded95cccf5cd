"""Hooks of the documentation site."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to files outside docs/, which the site does not have, by their text."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Remove the reStructuredText of docstrings, which Markdown does not render: roles and double colons."""
    return re.sub(r":(?:func|meth|class|attr):(?=<code>)|:(?=:</p>)", "", html)
