"""Text out of files as it may be shown on a terminal."""

import re

# Control characters of both sets, marks that turn the direction of writing, breaks of lines and paragraphs,
# and halves of pairs, which stand for bytes of file names that are not UTF-8.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """``text`` on one line, with an escape such as ``\\x1b`` for each character that is none to be seen.

    What comes out of files (names of columns, values, paths) could otherwise move the cursor, change colours,
    or read backwards.
    """
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
