"""Rows of ``click_rows`` prepared by this project: FILE, ``build`` or ``hash``, a folder for the result.

That is what a master does before it trains, without what it imports to train.
"""

import sys
from pathlib import Path

from hybrid.config.loading import load_config
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.primitives.progress import ignore_progress


def main(path: str, vocabulary: str, result: str) -> None:
    """Write arrays, vocabularies and checksums."""
    scaling = "data.numeric_scaling=standardize(log = true)"
    settings = ["data.format=criteo", scaling, f"data.vocabulary={vocabulary}"]
    config = load_config(None, [f"data.path={path}", *settings])
    folder = Path(result)
    preparation = FilesPreparation(config, folder, ignore_progress, lambda: None)
    encoder, reports = preparation.write({"train": [Path(path)], "test": []})
    encoder.save(folder)
    DataManifest.write(folder, encoder.input_spec, reports)


if __name__ == "__main__":
    main(*sys.argv[1:])
