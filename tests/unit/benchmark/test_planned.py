"""The tables of docs/planning.md: clusters of all sizes, in the docs as the package's costs have them."""

from benchmark.planned import CLUSTERS, SIZES, planned_tables
from support.commands import ROOT

from workers.planning.costs import Costs


def test_messages_take_more_of_a_step_the_larger_the_cluster() -> None:
    clusters, _, growing = planned_tables(Costs.read())
    assert [row[0] for row in clusters.rows] == [f"{w:,}, {t:,}, {h:,}" for w, t, h in CLUSTERS]
    assert [row[1] for row in growing.rows] == [f"{size**2:,}" for size in SIZES]
    for column in (3, 4, 5):
        shares = [int(row[column].rstrip("%")) for row in growing.rows]
        assert shares == sorted(shares)
        assert shares[0] < shares[-1]


def test_the_docs_have_them() -> None:
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    for table in planned_tables(Costs.read()):
        _, _, _, _, *lines = table.markdown().splitlines()
        assert [line for line in lines if line not in page] == [], table.title
