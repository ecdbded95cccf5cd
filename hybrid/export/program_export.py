"""A trained model as files that need nothing of this project, and what a server must do first."""

import json
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config.resolved_columns import Column, columns_of
from hybrid.data.prepare.new_rows import section_for
from hybrid.errors import HybridError
from hybrid.inference.model_outputs import prediction_names
from hybrid.inference.trained_module import SAMPLES, STARTS, TrainedModule
from hybrid.user_code.tracebacks import describe_error

PREPROCESSING_FILE = "preprocessing.json"
PROGRAM_FILE = "program.pt2"
ONNX_FILE = "model.onnx"
TABLES_FILE = "tables.safetensors"
_FORMAT = 1
_ONNX_PACKAGES = ("onnx", "onnxscript")
# Of the samples that the program is recorded with; none is a size that torch would take for fixed.
_RECORDED, _IDS = {SAMPLES: 3, STARTS: 4}, 5


class _PlainTensors(nn.Module):
    """The model as a function of plain tensors, in the order of ``input_names``."""

    def __init__(self, model: TrainedModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        # Relates the sizes before the model uses them. Otherwise torch guards on at least two samples.
        sizes = [
            tensor.shape[0] - (each.shape[0] == STARTS)
            for each, tensor in zip(self.model.inputs, tensors, strict=True)
            if each.shape[0] in _RECORDED
        ]
        assert all(size == sizes[0] for size in sizes)
        given: dict[str, Tensor] = self.model(dict(zip(self.model.input_names, tensors, strict=True)))
        return given


def narrow(model: TrainedModule, dtype: torch.dtype) -> None:
    """Convert the tables of a model to a data type; the nets compute in theirs."""
    for index, name in enumerate(model.table_names):
        model.tables[index] = nn.Embedding.from_pretrained(model.rows(name).detach().to(dtype))


def recorded_program(model: TrainedModule) -> ExportedProgram:
    """The model as a program of torch's operators on plain tensors, for any number of samples and ids.

    It computes in the type of its nets; ``dense.autocast`` is no part of it.

    Raises:
        HybridError: a net does what such a program cannot hold.
    """
    model.autocast = None
    samples = Dim("samples")
    named: dict[str, Any] = {SAMPLES: samples, STARTS: samples + 1}
    inputs: list[Tensor] = []
    sizes: list[dict[int, Any]] = []
    for each in model.inputs:
        first, *rest = each.shape
        inputs.append(torch.zeros(_RECORDED.get(first, _IDS), *rest, dtype=each.dtype))
        sizes.append({0: named.setdefault(first, Dim(f"ids_{len(named)}"))})
    plain = _PlainTensors(model.requires_grad_(False)).eval()
    # Without an input of one value per sample, only this mode takes fewer than two samples.
    has_only_bags = all(each.shape[0] != SAMPLES for each in model.inputs)
    with (
        _saying_why("program"),
        torch.no_grad(),
        _config.patch(backed_size_oblivious=has_only_bags),  # type: ignore[attr-defined]
    ):
        return torch.export.export(plain, tuple(inputs), dynamic_shapes=(tuple(sizes),))


def write_program(program: ExportedProgram, folder: Path) -> list[str]:
    """Write what ``torch.export.load`` reads; the names of the files."""
    torch.export.save(program, folder / PROGRAM_FILE)
    return [PROGRAM_FILE]


def check_onnx() -> None:
    """HybridError where the packages that write ONNX are missing."""
    missing = [name for name in _ONNX_PACKAGES if find_spec(name) is None]
    if missing:
        raise HybridError(
            f"--format onnx: needs {' and '.join(missing)}: pip install 'hybrid-parallel[onnx]'"
        )


def write_onnx(program: ExportedProgram, model: TrainedModule, folder: Path) -> list[str]:
    """Write ONNX with the names of the model's inputs; the names of the files.

    Raises:
        HybridError: ONNX lacks an operator of a net, or an output would have the name of an input.
    """
    output_names = prediction_names(model.trained.config.all_tasks)
    if taken := sorted({*output_names} & {*model.input_names}):
        raise HybridError(f"--format onnx: {', '.join(taken)} is an input and an output; rename the column")
    with _saying_why("onnx"), _quiet():
        made = torch.onnx.export(
            program,
            input_names=list(model.input_names),
            output_names=output_names,
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    _set_apart(made.model.graph, {*model.input_names, *output_names})
    made.save(folder / ONNX_FILE)  # what is beyond the 2 GiB of a message of protobuf, in a file beside it
    return [ONNX_FILE, *(path.name for path in folder.glob(f"{ONNX_FILE}.*"))]


def _set_apart(graph: Any, taken: Collection[str]) -> None:
    """Rename what within a graph has the name of an input or an output: a column may be called "cat"."""
    beside = {id(value) for value in (*graph.inputs, *graph.outputs)}
    within = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*within, *graph.initializers.values()):
        if value.name in taken and id(value) not in beside:
            value.name = f"{value.name} within"


@contextmanager
def _saying_why(form: str) -> Iterator[None]:
    """Turn an error of torch's exporter into one line with its reasons."""
    try:
        yield
    except Exception as error:  # torch and custom nets raise many types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # torch lists violated constraints below the first line of its message.
        below = [line.strip() for line in str(cause).splitlines()[1:]]
        reason = next((f"; {line[2:]}" for line in below if line.startswith("- ")), "")
        raise HybridError(
            f"--format {form}: torch cannot export the net: {describe_error(cause)}{reason}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the user what the exporter says of packages that it could use, and of deprecated calls."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        log.setLevel(level)


def write_tables(model: TrainedModule, names: Mapping[str, str], folder: Path) -> list[str]:
    """Write tables as safetensors; return the names of the files.

    Args:
        names: the name of each table in the file.
    """
    tensors = {names[table]: model.rows(table).detach() for table in model.table_names}
    write_tensors(folder, TABLES_FILE, tensors)
    return [TABLES_FILE]


def write_preprocessing(model: TrainedModule, folder: Path) -> list[str]:
    """Write how raw values become the inputs, for whoever serves the model; docs/serving.md describes it."""
    trained = model.trained
    config, spec = trained.config, trained.encoder.input_spec
    dense, sparse = columns_of(section_for(config, [], spec), config.columns)
    fitted = trained.encoder
    content = {
        "format": _FORMAT,
        "inputs": [
            {"name": each.name, "type": _type(each.dtype), "shape": each.shape} for each in model.inputs
        ],
        "outputs": _outputs(model),
        "missing": list(config.data.missing),
        "dense": [
            {**asdict(how), "source": column.source} for how, column in zip(fitted.dense, dense, strict=True)
        ],
        "sparse": [
            {**how.fields, "values": [*how.values], **_made(column)}
            for how, column in zip(fitted.sparse, sparse, strict=True)
        ],
    }
    text = json.dumps(content, ensure_ascii=False, indent=1)
    (folder / PREPROCESSING_FILE).write_text(text, encoding="utf-8")
    return [PREPROCESSING_FILE]


def _outputs(model: TrainedModule) -> list[dict[str, Any]]:
    tasks = model.trained.config.all_tasks
    return [
        {
            "name": output,
            "type": _type(model.dtype),
            "shape": [SAMPLES, task.classes] if task.kind == "classes" else [SAMPLES],
            "task": name,
            "kind": task.kind,
        }
        for output, (name, task) in zip(prediction_names(tasks), tasks.items(), strict=True)
    ]


def _made(column: Column) -> dict[str, Any]:
    """How a categorical column is made of those that a server gets."""
    return {
        "sources": column.sources,
        "kind": column.kind,
        "multi_hot_separator": column.separator,
        "weight_separator": column.weight_separator,
        "max_ids": column.max_ids,
        "too_many_ids": column.too_many_ids,
    }


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
