"""Write a log of music streaming that drifts, one folder per day, with the best AUC that a model can reach.

    python examples/drifting_log.py log --days 8

writes ``log/day=01/part-0.parquet`` and so on, in time order, with the columns user, item, artist, album,
seconds, event (listen, like, dislike, unlike, undislike) and timestamp. ``log/best_auc.csv`` has the AUC of
the true probabilities by day.

The user likes the item if the event is like or undislike. The log odds of this, on day t, are::

    -1.2 + 0.5 a(user) + 0.6 a(item) + 0.4 a(artist) + 0.3 a(album) + 0.5 log(seconds / 150)
    + u(user, t) . v(item)
    u(user, t) = cos(t / 10) u1(user) + sin(t / 10) u2(user)

All effects a and all factors u1, u2, v, of which there are two each, are standard normal. So tastes turn by
6 degrees a day.

There are always ``--users`` users and ``--items`` items. Each has a place with a fixed popularity, and is
replaced by a new one after 10 to 49 days (users), or 6 to 29 days (items). A row has the user at place
users * x**2, where x is uniform in [0, 1), and the younger of the items at two places items * x**2.

Every number is a function of the seed and the day, so a day does not depend on the days written before.
"""

from argparse import ArgumentParser, Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from hybrid.metrics import binary_metrics
from hybrid.primitives.key_hashes import splitmix64

FACTORS, ITEMS_OF_ARTIST = 2, 20
PART_ROWS, ROW_GROUP = 1_000_000, 16_384
EVENTS = np.array(["listen", "dislike", "unlike", "like", "undislike"])  # the last two are likes
DAY_0 = 1_700_006_400  # when day 0 begins, in seconds since 1970

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def bits(numbers: Ints, seed: int, purpose: int) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each number, by a hash function that ``seed`` and ``purpose`` select."""
    return splitmix64(splitmix64(numbers.astype(np.uint64)) + np.uint64(seed * 1000 + purpose))


def normal(numbers: Ints, seed: int, purpose: int) -> tuple[Floats, Floats]:
    """Return two standard normal values for each number, by the method of Box and Muller (1958)."""
    random = bits(numbers, seed, purpose)
    radius = np.sqrt(-2 * np.log(((random >> np.uint64(32)).astype(float) + 1) / 2**32))
    angle = 2 * np.pi / 2**32 * (random & np.uint64(2**32 - 1)).astype(float)
    return radius * np.cos(angle), radius * np.sin(angle)


def residents(
    places: Ints, num_places: int, day: int, shortest: int, seed: int, purpose: int
) -> tuple[Ints, Ints]:
    """Return the users or items at some places, and for how many days they have been there."""
    random = bits(places, seed, purpose)
    days = shortest + (random % np.uint64(4 * shortest)).astype(np.int64)
    since = day + (random >> np.uint64(32)).astype(np.int64) % days
    return places + num_places * (since // days), since % days


def draw(options: Namespace, day: int, start: int, num_rows: int) -> tuple[dict[str, Any], Floats]:
    """Return the columns of ``num_rows`` rows of a day from row ``start``, and their logits."""
    seed, users, items = options.seed, options.users, options.items
    rng = np.random.default_rng((seed, day, start))
    user, _ = residents((users * rng.random(num_rows) ** 2).astype(np.int64), users, day, 10, seed, 1)
    pairs = (items * rng.random((2, num_rows)) ** 2).astype(np.int64)
    (item, age), (other, other_age) = (residents(each, items, day, 6, seed, 2) for each in pairs)
    item = np.where(age <= other_age, item, other)
    random = bits(item, seed, 3)
    artist = (random % np.uint64(1 + items // ITEMS_OF_ARTIST)).astype(np.int64)
    album = 4 * artist + (random >> np.uint64(62)).astype(np.int64)
    seconds = np.clip(150 * np.exp(0.8 * rng.standard_normal(num_rows)), 1, 3600).astype(np.int32)
    logits = -1.2 + 0.5 * np.log(seconds / 150)
    for scale, numbers, purpose in ((0.5, user, 4), (0.6, item, 5), (0.4, artist, 6), (0.3, album, 7)):
        logits += scale * normal(numbers, seed, purpose)[0]
    for factor in range(FACTORS):
        u1, u2 = normal(user, seed, 10 + factor)
        taste = np.cos(day / 10) * u1 + np.sin(day / 10) * u2
        logits += taste * normal(item, seed, 20 + factor)[0]
    is_like = rng.random(num_rows) < 1 / (1 + np.exp(-logits))
    kind = rng.random(num_rows)
    event = np.where(is_like, 3 + (kind > 0.9), 0 + (kind > 0.85) + (kind > 0.95))
    times = 86_400 * (start + num_rows * np.sort(rng.random(num_rows))) / options.rows
    ids = {"user": user, "item": item, "artist": artist, "album": album}
    timestamp = DAY_0 + 86_400 * day + times.astype(np.int64)
    return {**ids, "seconds": seconds, "event": event, "timestamp": timestamp}, logits


def add_history(columns: dict[str, Any], options: Namespace) -> None:
    """Add the hour, a random bit, and the items that the user liked before, on that day and in that file."""
    times = columns["timestamp"]
    columns["hour"] = times % 86_400 // 3600
    columns["is_organic"] = (bits(times, options.seed, 8) % np.uint64(2)).astype(np.int64)
    rows = zip(*(pa.array(columns[name]).to_pylist() for name in ("user", "item", "event")), strict=True)
    liked: dict[Any, list[Any]] = defaultdict(list)
    columns["liked"] = histories = []
    for user, item, event in rows:
        histories.append(liked[user][-options.history :])
        if event in EVENTS[3:]:
            liked[user].append(item)


def write_day(options: Namespace, day: int) -> float:
    """Write the folder of a day; return its best AUC."""
    folder = options.folder / f"day={day:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    all_logits, all_likes = [], []
    for part, start in enumerate(range(0, options.rows, PART_ROWS)):
        columns, logits = draw(options, day, start, min(PART_ROWS, options.rows - start))
        all_logits.append(torch.from_numpy(logits))
        all_likes.append(torch.from_numpy(columns["event"] >= 3))
        columns["event"] = pa.DictionaryArray.from_arrays(columns["event"], EVENTS)
        for name in ("user", "item", "artist", "album") if options.ids == "texts" else ():
            columns[name] = pc.binary_join_element_wise(name[:2], pa.array(columns[name]).cast("string"), "")
        if options.history:
            add_history(columns, options)
        pq.write_table(pa.table(columns), folder / f"part-{part}.parquet", row_group_size=ROW_GROUP)
    return binary_metrics(torch.cat(all_logits), torch.cat(all_likes)).auc


def main() -> None:
    parser = ArgumentParser(description="Write a log of music streaming that drifts, one folder per day.")
    parser.add_argument("folder", type=Path, help="where the folders of the days are written")
    parser.add_argument("--days", type=int, default=8, help="number of days (default: 8)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows per day (default: 200,000)")
    parser.add_argument("--users", type=int, default=1000, help="users at any time (default: 1,000)")
    parser.add_argument("--items", type=int, default=500, help="items at any time (default: 500)")
    parser.add_argument("--ids", choices=("integers", "texts"), default="texts", help="(default: texts)")
    help_text = "largest number of items in a column of earlier likes (default: 0, without this column)"
    parser.add_argument("--history", type=int, default=0, help=help_text)
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options = parser.parse_args()
    lines = [f"{day},{write_day(options, day):.4f}\n" for day in range(1, options.days + 1)]
    (options.folder / "best_auc.csv").write_text("".join(["day,auc\n", *lines]))


if __name__ == "__main__":
    main()
