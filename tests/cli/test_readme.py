"""The README is right: its code runs, its configuration trains, and what it names is there."""

import dataclasses
import random
import re
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, code_block, output_of, result_of

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.config.sections import NAMED_KEYS
from workers.cli import main

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = dataclasses.asdict(RunConfig())


def write_clicks(path: Path, num_rows: int = 2000) -> None:
    """A click log with the columns of the README's configuration, in which the item decides."""
    draw = random.Random(1)
    with path.open("w") as file:
        print("clicked,price,age,user,item,tags", file=file)
        for _ in range(num_rows):
            item = draw.randrange(10)
            clicked = int(draw.random() < (0.9 if item < 3 else 0.1))
            tags = "|".join(draw.sample("abcd", draw.randrange(3)))
            print(
                f"{clicked},{draw.random():.3f},{draw.randrange(99)},u{draw.randrange(50)},i{item},{tags}",
                file=file,
            )


def test_its_net_and_its_configuration_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text(code_block("docs/models.md", "python", "class Gates"))
    (tmp_path / "clicks.toml").write_text(code_block("README.md", "toml"))
    write_clicks(tmp_path / "clicks.csv")
    own_net = ["--set", "dense.net=my_net:build", "--set", "run.folder=trained"]
    output_of(["launch", "--config", "clicks.toml", *own_net], tmp_path, afresh=True)
    assert result_of(tmp_path / "trained")["auc"] > 0.75
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a command that is started there
    main(["predict", "trained", "--input", "clicks.csv", "--output", "p.csv"])
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 2001
    check_that_another_user_is_asked(monkeypatch)


def check_that_another_user_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run in the folder ``trained`` names code, which somebody else has not chosen to run."""
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
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        line = str(refused.value.code)
        assert line.startswith(f"hybrid {arguments[0]}: dense.net = 'my_net:build': trained/"), line
        assert line.endswith("look at it, and then allow it with --trust-code"), line
    assert "my_net" not in sys.modules
    main(["predict", "trained", *predict, "--trust-code"])
    assert len(Path("q.csv").read_text().splitlines()) == 2001


def test_every_file_it_names_is_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    named = re.findall(r"\b(?:configs|docs|hybrid|scripts|workers)/[\w./]*\w", README)
    assert links
    assert [path for path in {*links, *named} if not (ROOT / path).exists()] == []


def test_every_key_it_names_is_one() -> None:
    words = re.sub(r"^```python\n.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    dotted = re.findall(r"\b([a-z]+)\.(?!(?:py|md)\b)([a-z_]+)\b", words)
    known = {name: keys for name, keys in SECTIONS.items() if name not in NAMED_KEYS}
    wrong = [f"{s}.{key}" for s, key in dotted if s in known and key not in known[s]]
    assert wrong == []


def test_its_configuration_has_ten_lines(tmp_path: Path) -> None:
    text = code_block("README.md", "toml")
    (tmp_path / "clicks.toml").write_text(text)
    assert load_config(tmp_path / "clicks.toml").data.multi_hot_separator == "|"
    assert len(text.splitlines()) == 10
