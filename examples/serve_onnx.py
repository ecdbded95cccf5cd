"""Predict the rows of a CSV file with ONNX Runtime, from the files of ``hybrid export --format onnx``.

``python examples/serve_onnx.py served clicks.csv`` prints the predictions of ``hybrid predict``. The program
needs NumPy and onnxruntime, but not this project. Of the rules for the canonical form of categorical values
(``hybrid/data/values/canonical.py``), it has the one for integers such as ``7.0``.
"""

import csv
import datetime
import hashlib
import json
import math
import re
import sys
from bisect import bisect
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}(:[0-9]{2}){1,2}(\.[0-9]+)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?"
Value = str | float | None  # of a categorical column; None if it is missing

folder, lines = Path(sys.argv[1]), Path(sys.argv[2]).read_text("utf-8-sig").split("\n")
samples = list(csv.DictReader(lines))
spec = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
row_of = {f["name"]: {value: i + 1 for i, value in enumerate(f["values"])} for f in spec["sparse"]}


def canonical(text: str) -> str | None:
    """Return the canonical form of a text, or None if it is missing."""
    text = re.sub(r"^(-?(?:0|[1-9][0-9]*))\.0+$", r"\1", text.strip())  # 7.0 is 7
    return None if text in spec["missing"] else text


def number(text: str, below: float = 3.4028235e38) -> float:
    """Return a finite float32 number; a ValueError, here and below, means an invalid row."""
    if not re.fullmatch(NUMBER, text.strip()) or abs(float(text)) >= below:
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def scaled(field: str, shift: float, scale: float, missing: float, transform: str, **_: object) -> float:
    """Return the scaled value of a dense column."""
    text = canonical(field)
    if text is None:
        return missing
    x = number(text)
    if transform == "log":
        x = math.copysign(math.log1p(abs(x)), x)
    return (x - shift) / scale


def hour_or_weekday(text: str, kind: str) -> float:
    """Return the hour or the weekday of a date, or of seconds since 1970."""
    if re.fullmatch(DATE, text):
        at = datetime.datetime.fromisoformat(text)
        return at.hour if kind == "hour" else at.weekday()
    day, second = divmod(number(text, below=253_402_300_800), 86_400)
    return second // 3600 if kind == "hour" else (day + 3) % 7


def key(text: str) -> int:
    """Return the key of a value in a growing table, an int64: a hash of an integer (SplitMix64) or a text."""
    if re.fullmatch("0|-?[1-9][0-9]*", text) and -(2**63) <= int(text) < 2**64:
        x = (int(text) + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    else:
        x = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return x - (x >> 63 << 64)


def row(value: Value, name: str, vocabulary: str, num_rows: int, bounds: list[float], **_: object) -> int:
    """Return the table row of a value, or its key if the table grows; 0 if it is missing or unknown."""
    if value is None:
        return 0
    if not isinstance(value, str):
        return 1 + bisect(bounds, value)
    if vocabulary == "grow":
        return key(value)
    if vocabulary == "hash":
        digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
        return 1 + int.from_bytes(digest, "little") % (num_rows - 1)
    if vocabulary == "identity":
        return int(value) if value.isdecimal() and int(value) < num_rows else 0
    return int(row_of[name].get(value, 0))


def weighted_values(sample: dict[str, str], feature: dict[str, Any]) -> list[tuple[Value, float]]:
    """Return the values of a sample in a categorical column, each with its weight."""
    kind, separator = feature["kind"], feature["multi_hot_separator"]
    fields = [sample[source] for source in feature["sources"]]
    texts = [canonical(field) for field in fields]
    if kind == "cross":
        known = [text for text in texts if text is not None]
        return [("\x1f".join(known) if len(known) == len(texts) else None, 1.0)]
    if kind in ("buckets", "hour", "weekday"):
        (text,) = texts
        if text is None:
            return [(None, 1.0)]
        return [(number(text) if kind == "buckets" else hour_or_weekday(text, kind), 1.0)]
    (field,) = fields
    ids = [each for each in (field.split(separator) if separator else [field]) if canonical(each) is not None]
    if kind == "weighted":  # an id without a weight is an error
        mark = feature["weight_separator"]
        pairs = [
            (each.rpartition(mark)[0], each.rpartition(mark)[2]) if mark in each else (each, "")
            for each in ids
        ]
    else:
        pairs = [(each, "1") for each in ids]
    bag = [(canonical(text), number(weight)) for text, weight in pairs if canonical(text) is not None]
    if any(weight < 0 for _, weight in bag):
        raise ValueError(f"{field!r} has a weight below 0")
    max_ids, rule = feature["max_ids"], feature["too_many_ids"]
    if max_ids and len(bag) > max_ids:
        if rule == "invalid_row":
            raise ValueError(f"{field!r} has more than {max_ids} ids")
        bag = bag[-max_ids:] if rule == "keep_last" else bag[:max_ids]
    return [*bag]


numbers, bags = dict[int, list[float]](), dict[int, list[list[tuple[Value, float]]]]()
predictions = dict[int, tuple[object, ...]]()
for index, sample in enumerate(samples):
    try:
        if None in sample or None in sample.values():
            raise ValueError("the number of columns differs from that of the header")
        numbers[index] = [scaled(sample[f["source"]], **f) for f in spec["dense"]]
        bags[index] = [weighted_values(sample, f) for f in spec["sparse"]]
    except ValueError as error:
        predictions[index] = (f"invalid row: {error}",)
valid = [*bags]
inputs = dict[str, Any]()
if spec["dense"]:
    inputs["dense"] = np.array([numbers[i] for i in valid], np.float32).reshape(
        len(valid), len(spec["dense"])
    )
for position, feature in enumerate(spec["sparse"]):
    name, column = feature["name"], [bags[i][position] for i in valid]
    if feature["multi_hot"]:
        inputs[name] = np.array([row(value, **feature) for bag in column for value, _ in bag], np.int64)
        inputs[f"{name}.offsets"] = np.cumsum([0, *map(len, column)])
    else:
        inputs[name] = np.array([row(b[0][0], **feature) if len(b) == 1 else 0 for b in column], np.int64)
    if feature["weighted"]:
        inputs[f"{name}.weights"] = np.array([weight for bag in column for _, weight in bag], np.float32)
session = onnxruntime.InferenceSession(folder / "model.onnx")
outputs = session.run([each["name"] for each in spec["outputs"]], inputs)
columns = [column for output in outputs for column in (output.T if output.ndim > 1 else [output])]
predictions.update(zip(valid, zip(*columns, strict=True), strict=True))
for index in sorted(predictions):
    print(index, *predictions[index], sep=",")
