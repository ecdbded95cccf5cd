"""The manifest of a prepared data set: its columns, its rows, its input files, and its checksums."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.data_sections import PATH_KEYS
from hybrid.config.loading import CONFIG_FILE
from hybrid.data.encode import feature_encoder
from hybrid.data.encode.feature_encoder import UnknownValues
from hybrid.data.parse.input_files import InputFile, compute_sampled_checksum
from hybrid.data.values.invalid_rows import InvalidRowReport
from hybrid.errors import DataError, StorageError
from hybrid.input_spec import InputSpec
from hybrid.storage.file_formats import is_inner_name, parse_fields, parse_json
from hybrid.storage.files import compute_checksum, read_bytes, read_text, write_bytes
from hybrid.storage.remote_path import StoragePath
from hybrid.user_code.run_signature import signed_toml

FORMAT_VERSION = 7  # raise it whenever the same configuration would be prepared differently
FILE_NAME = "manifest.json"
COPY_NAME = "data.json"  # in a checkpoint
NO_INVALID_ROWS = InvalidRowReport({}, ())


@dataclass(frozen=True, slots=True)
class LabelReport:
    """The labels of one task in a split."""

    name: str
    kind: str
    count: int  # number of samples with a weight above 0 for the task
    # mean, lowest, highest: statistics of the labels of these samples; None without samples.
    mean: float | None = None
    lowest: float | None = None
    highest: float | None = None
    # best_auc, best_log_loss: metrics of the true probabilities, if they are known.
    best_auc: float | None = None
    best_log_loss: float | None = None

    @property
    def constant(self) -> float | None:
        """The label that all samples with a weight above 0 share (task kinds binary and classes), or None."""
        return self.lowest if self.kind in ("binary", "classes") and self.lowest == self.highest else None


@dataclass(frozen=True)
class DatasetReport:
    """Statistics of the rows of a split."""

    num_rows: int
    labels: tuple[LabelReport, ...]  # of each task; empty without labels
    # Skipped invalid rows of the input. For held-out splits, the report of "train" has them.
    bad_rows: InvalidRowReport
    unknown: tuple[UnknownValues, ...] = ()  # unknown categorical values by column; empty for synthetic data


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The checksums of a file of a prepared data set."""

    sampled: str  # checksum of the size and of some blocks (compute_sampled_checksum)
    whole: str  # SHA-256 of the full content


@dataclass(frozen=True)
class DataManifest:
    """The content of ``manifest.json``, which is written last: a folder with this file is complete."""

    input_spec: InputSpec
    splits: dict[str, DatasetReport]
    inputs: dict[str, tuple[InputFile, ...]]  # files of each split (none if held out), and side tables
    stored: dict[str, StoredFile]  # checksums of every other file, by its path in the folder

    @classmethod
    def write(
        cls,
        folder: Path,
        spec: InputSpec,
        splits: dict[str, DatasetReport],
        inputs: dict[str, tuple[InputFile, ...]],
    ) -> None:
        """Write the manifest of ``folder``; all other files must be in the folder."""
        stored = {
            str(path.relative_to(folder)): StoredFile(compute_sampled_checksum(path), compute_checksum(path))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        content = {"format": FORMAT_VERSION, **asdict(cls(spec, splits, inputs, stored))}
        write_bytes(folder / FILE_NAME, json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, path: StoragePath, rule: str = "") -> DataManifest:
        """Read a manifest.

        Args:
            rule: the end of the message if another version of this program wrote the manifest.

        Raises:
            DataError: the manifest is missing, invalid, or of another version.
            StorageError: a store refuses the request, or the manifest is a link.
        """
        try:
            content = parse_json(read_bytes(path))
            if content.pop("format") != FORMAT_VERSION:
                raise DataError(f"{path}: made by another version of this program" + (rule and f"; {rule}"))
            manifest = parse_fields(cls, content)
            if not all(map(is_inner_name, manifest.stored)):
                raise ValueError("it lists a file outside of its folder")
            if any(report.num_rows < 0 for report in manifest.splits.values()):
                raise ValueError("a number of rows is negative")
            return manifest
        except StorageError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error

    def check(self, folder: Path, split: str) -> None:
        """Raise DataError if there is no ``split``, or a file that it needs is missing or altered."""
        if split not in self.splits:
            raise DataError(f"{folder / FILE_NAME}: has no split {split}")
        for name, file in self.stored.items():
            top = Path(name).parts[0]
            if top in self.splits and top != split:
                continue
            try:
                found = compute_sampled_checksum(folder / name, folder)
            except StorageError as error:
                raise DataError(str(error)) from error
            except OSError as error:
                raise DataError(f"{folder / name}: cannot be read ({error})") from error
            if found != file.sampled:
                raise DataError(f"{folder / name}: altered since it was prepared")

    def check_same(self, current: DataManifest, remedy: str) -> None:
        """Raise DataError if ``current`` has other checksums of files; the message ends with ``remedy``."""
        if {n: f.whole for n, f in self.stored.items()} == {n: f.whole for n, f in current.stored.items()}:
            return
        for split, before in self.inputs.items():
            files = current.inputs.get(split, ())
            for then, file in zip(before, files, strict=False):
                if file.sampled != then.sampled:
                    raise DataError(f"{file.path}: has changed since the run began; {remedy}")
            if len(files) != len(before):
                known = f"{len(files)} file(s), and {len(before)} when the run began"
                raise DataError(f"{PATH_KEYS.get(split, split)} names {known}; {remedy}")
        raise DataError(
            f"the configuration prepares other samples from the files than when the run began; {remedy}"
        )


def checkpoint_contents(
    config: RunConfig, data: StoragePath | None
) -> tuple[dict[str, str], dict[str, StoragePath]]:
    """Return what a checkpoint copies: texts by file name, and the path of the vocabulary file by file name.

    ``data`` is the folder of the prepared data. If it is None, only the configuration is copied.
    """
    texts = {CONFIG_FILE: signed_toml(config)}
    if data is None:
        return texts, {}
    sources = {feature_encoder.FILE_NAME: feature_encoder.FILE_NAME, COPY_NAME: FILE_NAME}
    texts |= {name: read_text(data / source) for name, source in sources.items()}
    return texts, feature_encoder.vocabulary_files(data)
