"""A run, its data and what is predicted in Google's store and in Azure's, as with the same on a disk."""

import re
from pathlib import Path

import pytest
from support.commands import output_of, settings
from support.trained import write_clicks

from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("store", ["google", "azure"])
def test_a_run_goes_on_elsewhere_and_is_evaluated(
    request: pytest.FixtureRequest, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = request.getfixturevalue(store)
    assert isinstance(bucket, RemotePath)
    write_clicks(tmp_path / "clicks.csv", 300, seed=8)
    files.copy(tmp_path / "clicks.csv", bucket / "clicks.csv")
    shown: list[tuple[list[str], bytes]] = []
    places: tuple[StoragePath, StoragePath] = (tmp_path, bucket)
    for folder in places:
        columns = {"label": "clicked", "dense": '["price"]', "sparse": '["user"]', "format": "csv"}
        data = {"path": folder / "clicks.csv", "cache_folder": folder / "prepared", **columns}
        keys = settings(data=data, run={"folder": folder / "run"}, checkpoint={"every_steps": 5})
        keys += [*settings(train={"batch_size": 8}), "--resume", "auto"]
        output_of(["launch", *keys, *settings(train={"max_steps": 12})], tmp_path, afresh=True)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"elsewhere-{len(shown)}"))
        said = output_of(["launch", *keys, *settings(train={"max_steps": 20})], tmp_path, afresh=True)
        assert "resuming from step 12" in said
        output_of(["predict", folder / "run", "--output", folder / "p.csv"], tmp_path, afresh=True)
        said = output_of(["evaluate", folder / "run"], tmp_path, afresh=True)
        shown.append((re.findall(r"\d\.\d{4}", said), files.read_bytes(folder / "p.csv")))
    assert shown[0] == shown[1]
