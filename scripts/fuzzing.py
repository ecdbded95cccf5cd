"""Coverage-guided fuzzing of the readers of text files, by atheris; see scripts/fuzz.

The first byte of an input selects the layout, labels and block size; the rest is the file. Inputs that break
a reader are written to ``crash-*`` in the current folder.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hybrid.data"]):
    from support.hostile import LAYOUTS, TOKENS, read_hostile

_BLOCK_BYTES = (7, 1 << 20)


def main() -> None:
    """Fuzz for the number of seconds that the command line gives."""
    with tempfile.TemporaryDirectory(prefix="hybrid-fuzz-") as folder:
        path, corpus = Path(folder) / "file", Path(folder) / "corpus"
        dictionary = Path(folder) / "words"
        dictionary.write_text("".join(f'"{_escaped(token[:64])}"\n' for token in TOKENS))
        corpus.mkdir()
        for number, token in enumerate(TOKENS):
            (corpus / str(number)).write_bytes(bytes([number]) + token)

        def read(raw: bytes) -> None:
            choice = raw[0] if raw else 0
            path.write_bytes(raw[1:])
            layout = LAYOUTS[choice % len(LAYOUTS)]
            read_hostile(path, layout, bool(choice & 64), _BLOCK_BYTES[choice >> 7])

        limits = [
            f"-max_total_time={sys.argv[1]}",
            f"-dict={dictionary}",
            "-max_len=2000",
            "-rss_limit_mb=4096",
        ]
        atheris.Setup([sys.argv[0], *limits, str(corpus)], read)
        atheris.Fuzz()


def _escaped(token: bytes) -> str:
    return "".join(rf"\x{byte:02x}" for byte in token)


if __name__ == "__main__":
    main()
