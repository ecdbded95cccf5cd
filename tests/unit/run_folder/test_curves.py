"""The curves of a run leave nothing but their file."""

import os
import subprocess
import sys
from pathlib import Path

from support.commands import ROOT


def test_no_file_is_left_in_the_home_folder(tmp_path: Path) -> None:
    code = "import sys, pathlib, workers.run_folder.curves as c; c.draw_curves([], pathlib.Path(sys.argv[1]))"
    hidden = ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    curves = tmp_path / "curves.png"
    subprocess.run([sys.executable, "-c", code, curves], cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.rglob("*")) == [curves]
