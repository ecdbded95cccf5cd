"""Vocabularies: the index of each value, and the files that hold them."""

import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid.checkpoint.checkpoint_folders import VOCABULARIES_FILE, write_vocabulary
from hybrid.data.encode.feature_encoder import FeatureEncoder, SparseEncoding, vocabulary_files
from hybrid.data.encode.vocabulary_file import open_vocabularies, write_vocabularies
from hybrid.data.values import vocabulary
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.errors import DataError
from hybrid.storage.files import compute_checksum


def words(count: int, seed: int) -> list[str]:
    """Return short and long texts with common prefixes and suffixes, some of them empty or not ASCII."""
    draw = random.Random(seed)
    found = {"", "\0", "\0\0", "é", "e\u0301", "x" * 4096, "x" * 4095 + "y", "y" + "x" * 4096}
    while len(found) < count:
        found.add("".join(draw.choices("ab\u20ac", k=draw.randrange(12))) + str(draw.randrange(count)))
    return draw.sample(sorted(found), count)


@pytest.mark.parametrize("bits", [64, 5, 0])
def test_indices_equal_those_of_a_dict(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts may have equal hashes."""
    hashes = vocabulary._hash
    monkeypatch.setattr(vocabulary, "_hash", lambda texts: hashes(texts) & np.uint64(2**bits - 1))
    known, requested = words(300, 1), words(500, 2)
    found = Vocabulary.of(known)
    index_of = {word: index for index, word in enumerate(known)}
    texts = pa.array([*requested, None, *known], pa.string())
    expected = [*(index_of.get(word, -1) for word in requested), -1, *range(300)]
    assert found.indices(texts).tolist() == expected
    assert found.indices(texts.slice(7, 400)).tolist() == expected[7:407]
    shorter = Vocabulary(found.texts[100:])
    assert shorter.indices(texts).tolist() == [max(index - 100, -1) for index in expected]


def read_vocabularies(path: Path, sha256: str) -> list[Vocabulary]:
    with open_vocabularies(path, sha256) as file:
        return file.read_all()


def test_read_vocabularies_equal_written_ones(tmp_path: Path) -> None:
    vocabularies = [Vocabulary.of(words(50, 1)), Vocabulary.of([]), Vocabulary.of(words(70, 2))]
    path = tmp_path / VOCABULARIES_FILE
    write_vocabularies(path, vocabularies)
    assert read_vocabularies(path, compute_checksum(path)) == vocabularies
    with pytest.raises(DataError, match=f"^{path}: altered"):
        read_vocabularies(path, 64 * "0")
    pq.write_table(pa.table({"value": ["a", None]}), path)
    with pytest.raises(DataError, match=f"^{path}: cannot be read"):
        read_vocabularies(path, compute_checksum(path))
    path.unlink()
    with pytest.raises(DataError, match=f"^{path}: cannot be read"):
        read_vocabularies(path, 64 * "0")


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_small_file_that_claims_a_large_vocabulary_is_refused(tmp_path: Path, encoding: str) -> None:
    path, size = tmp_path / VOCABULARIES_FILE, 2 << 20
    schema = pa.schema([pa.field("value", pa.large_string(), False)], {b"sizes": str([size]).encode()})
    text = "" if encoding == "DELTA_LENGTH_BYTE_ARRAY" else 300 * "x"
    values = pa.array([text], pa.large_string()).take(pa.array(np.zeros(size, np.int8)))
    is_dictionary = encoding == "RLE_DICTIONARY"
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=is_dictionary,
        column_encoding=None if is_dictionary else {"value": encoding},
        write_statistics=False,
    ) as writer:
        writer.write_table(pa.table([values], schema), size)
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*(not encoded|claims 2,097,152 values)"):
        read_vocabularies(path, compute_checksum(path))


def test_shared_vocabulary_is_written_once(tmp_path: Path) -> None:
    values = Vocabulary.of(words(40, 1))
    sparse = [SparseEncoding(name, "build", 41, values=Vocabulary(values.texts)) for name in ("item", "seen")]
    sparse.append(SparseEncoding("shop", "build", 3, values=Vocabulary.of(["b", "a"])))
    encoder = FeatureEncoder((), (*sparse, SparseEncoding("user", "hash", 9)))
    encoder.save(tmp_path)
    assert pq.read_metadata(tmp_path / VOCABULARIES_FILE).num_rows == 42
    assert FeatureEncoder.load(tmp_path) == encoder


def test_checkpoint_finds_the_vocabulary_files_its_run(tmp_path: Path) -> None:
    prepared, checkpoint = tmp_path / "prepared", tmp_path / "run/checkpoints/step-00000001"
    encoder = FeatureEncoder((), (SparseEncoding("item", "build", 3, values=Vocabulary.of(["b", "a"])),))
    prepared.mkdir()
    checkpoint.mkdir(parents=True)
    encoder.save(prepared)
    shutil.copyfile(prepared / "features.json", checkpoint / "features.json")
    ((name, source),) = vocabulary_files(prepared).items()
    kept = tmp_path / "run/vocabularies" / name
    with pytest.raises(DataError, match=f"{kept.parent}; copy {name} there"):
        FeatureEncoder.load(checkpoint)
    kept.parent.mkdir()
    (tmp_path / "mine").write_text("kept")
    for unfinished in (f"{name}.partial", f".{name}.unfinished"):
        (kept.parent / unfinished).symlink_to(tmp_path / "mine")
    assert write_vocabulary(checkpoint, name, source) == {}
    assert (tmp_path / "mine").read_text() == "kept"
    (kept.parent / f"{name}.partial").unlink()
    assert FeatureEncoder.load(checkpoint) == encoder
    stamp = kept.stat().st_mtime_ns
    write_vocabulary(checkpoint.with_name("step-00000002"), name, source)
    assert (kept.stat().st_mtime_ns, [*kept.parent.iterdir()]) == (stamp, [kept])
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"^{kept}: altered"):
        FeatureEncoder.load(checkpoint)
    shutil.copyfile(source, checkpoint / VOCABULARIES_FILE)
    kept.unlink()
    assert FeatureEncoder.load(checkpoint) == encoder
