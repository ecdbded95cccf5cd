"""README, docs and tour: code and configurations load, and named files, keys and functions exist.

Tests of commands run most code blocks of the pages.
"""

import ast
import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, code_block, output_of, refusal, result_of
from support.trained import write_clicks

import hybrid
from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.config.sections import NAMED_KEYS
from hybrid.custom_loop.cluster import Cluster
from workers.cli import main
from workers.cli.arguments import parse

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = {name: keys for name, keys in dataclasses.asdict(RunConfig()).items() if name not in NAMED_KEYS}
# Modules that torch and other packages import if they exist.
OPTIONAL = ("colorama", "cuda", "dill", "flint", "gmpy2", "opt_einsum", "org", "pandas", "pynvml", "tabulate")
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def test_configuration_of_the_readme_trains_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text(code_block("docs/models.md", "python", "class Gates"))
    (tmp_path / "clicks.toml").write_text(text := code_block("README.md", "toml"))
    assert len(text.splitlines()) == 10
    write_clicks(tmp_path / "clicks.csv", 2000)
    for name in OPTIONAL:  # as if somebody else had written the folder
        (tmp_path / f"{name}.py").write_text("open('imported', 'a').write(__name__)\n")
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info/entry_points.txt").write_text("[torch.backends]\nother = dill:load\n")
    custom_net = ["--set", "dense.net=my_net:build", "--set", "run.folder=trained"]
    output_of(["launch", "--config", "clicks.toml", *custom_net], tmp_path, afresh=True)
    assert result_of(tmp_path / "trained")["auc"] > 0.75
    monkeypatch.chdir(tmp_path)
    main(["predict", "trained", "--input", "clicks.csv", "--output", "p.csv"])
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 2001
    check_user_code_of_another_user_is_refused(monkeypatch)
    assert not Path("imported").exists()


def check_user_code_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the run in the folder ``trained`` names user code."""
    monkeypatch.setenv("XDG_STATE_HOME", "another")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delitem(sys.modules, "my_net")
    checkpoint = next(Path("trained/checkpoints").iterdir())
    predict = ["--input", "clicks.csv", "--output", "q.csv"]
    for arguments in (
        ["evaluate", "trained"],
        ["evaluate", str(checkpoint)],
        ["predict", "trained", *predict],
        ["launch", "--resume", "trained", "--set", "train.epochs=4"],
        ["master", "--resume", "trained"],
    ):
        line = refusal(*arguments)
        pattern = rf"hybrid {arguments[0]}: (data.path|dense.net) = .*: trained/.*dense.net"
        assert re.match(pattern, line), line
        assert line.endswith("--trust-code"), line
    assert "my_net" not in sys.modules
    main(["predict", "trained", *predict, "--trust-code"])
    assert len(Path("q.csv").read_text().splitlines()) == 2001


def test_files_that_the_readme_names_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    named = re.findall(r"\b(?:configs|docs|hybrid|scripts|workers)/[\w./]*\w", README)
    assert links
    assert [path for path in {*links, *named} if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_keys_on_a_page_exist(page: str) -> None:
    """``cluster.`` may also be the cluster object of a custom loop."""
    text = PAGES[page].read_text(encoding="utf-8")
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"(?<![\w./])([a-z]+)\.(?!(?:py|md|toml|json|safetensors)\b)([a-z_]+)\b(?!\[)", text)
    names = {section: {*keys} for section, keys in SECTIONS.items()}
    names["cluster"] |= {*dir(Cluster), "rank", "world_size"}
    assert [f"{s}.{key}" for s, key in named if s in names and key not in names[s]] == []


def blocks(language: str) -> dict[str, str]:
    """Return the code blocks of one language, by page and number."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        f"{page.name}-{i}": block
        for page in PAGES.values()
        for i, block in enumerate(fence.findall(page.read_text()))
    }


TOML, PYTHON = blocks("toml"), blocks("python")


@pytest.mark.parametrize("block", list(TOML.values()), ids=TOML)
def test_configuration_on_a_page_loads(block: str, tmp_path: Path) -> None:
    file = tmp_path / "page.toml"
    file.write_text(block)
    load_config(file)


@pytest.mark.parametrize("block", list(PYTHON.values()), ids=PYTHON)
def test_names_in_code_on_a_page_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in ("hybrid", "workers"):
                there = dir(importlib.import_module(module))
                assert [name.name for name in node.names if name.name not in there] == []
            case ast.Attribute(value=ast.Name(id="hybrid"), attr=name):
                assert hasattr(hybrid, name)


TOUR = ROOT / "examples/tour.sh"


def test_commands_and_configuration_of_the_tour_are_valid(tmp_path: Path) -> None:
    """Other tests of commands run each of these commands."""
    text = TOUR.read_text(encoding="utf-8")
    commands = [
        shlex.split(line)[1:] for line in re.findall(r"^(?:.*\| )?(hybrid [^>\n]*)", text, re.MULTILINE)
    ]
    names = [parse(arguments).command for arguments in commands]
    assert names == ["launch", "launch", "evaluate", "predict", "export"]
    (toml,) = re.findall(r"<<'TOML'\n(.*?)^TOML$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "clicks.toml").write_text(toml)
    assert load_config(tmp_path / "clicks.toml", commands[0][-1:]).train.max_steps == 80


@pytest.mark.long
def test_tour_resumes_a_run_and_predicts_each_new_row(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [TOUR, tmp_path / "tour"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resuming from step 80" in ended.stdout
    assert result_of(tmp_path / "tour/run")["auc"] > 0.72
    assert len((tmp_path / "tour/predictions.csv").read_text().splitlines()) == 1001
    assert (tmp_path / "tour/export/program.pt2").is_file()
