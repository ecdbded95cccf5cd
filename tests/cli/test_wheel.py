"""The wheel of the project."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from support.commands import ROOT


def test_wheel_has_the_two_packages_and_the_command(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("hybrid_parallel-*-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (commands,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "hybrid = workers.cli:main" in archive.read(commands).decode()
    folders = (ROOT / "hybrid", ROOT / "workers")
    sources = (
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".css", ".typed")
    )
    assert files == {str(path.relative_to(ROOT)) for path in sources}
