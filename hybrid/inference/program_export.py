"""A trained model as files for other programs: a torch.export program, ONNX, tables and preprocessing."""

import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from hybrid.config.data_sections import columns_of
from hybrid.data.parse.column_layout import create_file_section
from hybrid.errors import HybridError
from hybrid.inference.trained_module import SAMPLES, STARTS, TrainedModule, prediction_names
from hybrid.storage.files import write_bytes
from hybrid.user_code.user_modules import describe_error

PREPROCESSING_FILE = "preprocessing.json"
PROGRAM_FILE = "program.pt2"
ONNX_FILE = "model.onnx"
_FORMAT = 1
_ONNX_PACKAGES = ("onnx", "onnxscript")
# Sizes of the example inputs. torch specializes on 0 and 1, and on equal sizes.
_EXAMPLE_SIZES, _EXAMPLE_IDS = {SAMPLES: 3, STARTS: 4}, 5


class _PlainTensors(nn.Module):
    """The model as a function of plain tensors, in the order of ``TrainedModule.input_names``."""

    def __init__(self, model: TrainedModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        # With this assertion, torch knows that the sizes are equal. Otherwise it adds a guard that refuses
        # batches of fewer than two samples.
        sizes = [
            tensor.shape[0] - (each.shape[0] == STARTS)
            for each, tensor in zip(self.model.inputs, tensors, strict=True)
            if each.shape[0] in _EXAMPLE_SIZES
        ]
        assert all(size == sizes[0] for size in sizes)
        predictions: dict[str, Tensor] = self.model(dict(zip(self.model.input_names, tensors, strict=True)))
        return predictions


def export_program(model: TrainedModule) -> ExportedProgram:
    """Export a model as a program on plain tensors, for any number of samples and ids.

    The program computes in ``train.dtype``. The model is changed: ``model.autocast`` becomes None, and the
    parameters no longer require gradients. HybridError if torch cannot export the net.
    """
    model.autocast = None
    samples = Dim("samples")
    dims: dict[str, Any] = {SAMPLES: samples, STARTS: samples + 1}
    examples: list[Tensor] = []
    dynamic_shapes: list[dict[int, Any]] = []
    for each in model.inputs:
        first, *rest = each.shape
        examples.append(torch.zeros(_EXAMPLE_SIZES.get(first, _EXAMPLE_IDS), *rest, dtype=each.dtype))
        dynamic_shapes.append({0: dims.setdefault(first, Dim(f"ids_{len(dims)}"))})
    module = _PlainTensors(model.requires_grad_(False)).eval()
    # If no input has the size SAMPLES, only this mode exports a program for fewer than two samples.
    has_only_bags = all(each.shape[0] != SAMPLES for each in model.inputs)
    with (
        _export_errors("program"),
        torch.no_grad(),
        _config.patch(backed_size_oblivious=has_only_bags),  # type: ignore[attr-defined]
    ):
        return torch.export.export(module, tuple(examples), dynamic_shapes=(tuple(dynamic_shapes),))


def check_packages(formats: Sequence[str]) -> None:
    """Raise HybridError if ``formats`` contains "onnx" and the packages that write ONNX are missing."""
    missing = [name for name in _ONNX_PACKAGES if find_spec(name) is None]
    if missing and "onnx" in formats:
        rule = f"needs {' and '.join(missing)}; run pip install 'hybrid-parallel[onnx]'"
        raise HybridError(f"--format onnx: {rule}")


class _UnfailingWriter(io.BufferedWriter):
    """A writer that stores its last error and raises none, since torch would end the process on an error."""

    error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            super().write(content)
        except OSError as error:
            self.error = error
        return len(content)


def write_program(program: ExportedProgram, folder: Path) -> list[str]:
    """Write a program with ``torch.export.save``; return the name of the file. Raises OSError."""
    with _UnfailingWriter(io.FileIO(folder / PROGRAM_FILE, "w")) as file:
        torch.export.save(program, file)
    if file.error is not None:
        raise file.error
    return [PROGRAM_FILE]


def check_names(model: TrainedModule) -> None:
    """Raise HybridError if an output of ``model`` has the name of an input, which ONNX does not allow."""
    if repeated := ", ".join(sorted({each["name"] for each in _outputs(model)} & {*model.input_names})):
        raise HybridError(f"--format onnx: {repeated} is an input and an output; rename the column")


def write_onnx(program: ExportedProgram, model: TrainedModule, folder: Path) -> list[str]:
    """Write a program as ONNX, with inputs named as in ``model``; return the names of the files.

    The names must have passed :func:`check_names`. HybridError if ONNX lacks an operator of a net.
    """
    output_names = [each["name"] for each in _outputs(model)]
    # No messages about optional packages.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with _export_errors("onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        onnx_program: Any = torch.onnx.export(
            program.run_decompositions(_REPLACEMENTS) if model.growing_tables else program,
            input_names=list(model.input_names),
            output_names=output_names,
            dynamo=True,
            verbose=False,
        )
    # An inner value may have the name of an input or output, such as a column "cat".
    graph = onnx_program.model.graph
    outer = {id(value) for value in (*graph.inputs, *graph.outputs)}
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*inner, *graph.initializers.values()):
        if value.name in {*model.input_names, *output_names} and id(value) not in outer:
            value.name = f"{value.name} within"
    onnx_program.save(folder / ONNX_FILE)  # writes a second file if the model exceeds 2 GiB
    return [ONNX_FILE, *(path.name for path in folder.glob(f"{ONNX_FILE}.*"))]


def _search(ordered_N: Tensor, values_L: Tensor) -> Tensor:
    """Return, for each value, how many elements of ``ordered_N`` are lower; uses a binary search."""
    size, number_L = len(ordered_N), torch.zeros_like(values_L)
    for bit in reversed(range(size.bit_length())):
        next_L = number_L + (1 << bit)
        is_lower_L = (next_L <= size) & (ordered_N[(next_L - 1).clamp(max=size - 1)] < values_L)
        number_L = torch.where(is_lower_L, next_L, number_L)
    return number_L


# ONNX lacks this operator, which finds the keys of growing tables.
_REPLACEMENTS: dict[Any, Any] = {torch.ops.aten.searchsorted.Tensor: _search}


@contextmanager
def _export_errors(export_format: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch and custom nets raise many types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # torch lists violated constraints below the first line of its message.
        details = [line.strip() for line in str(cause).splitlines()[1:]]
        reason = next((f"; {line[2:]}" for line in details if line.startswith("- ")), "")
        rule = f"torch cannot export the net: {describe_error(cause)}{reason}"
        raise HybridError(f"--format {export_format}: {rule}") from error


def write_preprocessing(model: TrainedModule, folder: Path) -> list[str]:
    """Write the encoding of raw values as JSON (docs/serving.md); return the names of the files."""
    config, encoder = model.trained.config, model.trained.encoder
    dense, sparse = columns_of(create_file_section(config, [], encoder.input_spec), config.columns)
    content = {
        "format": _FORMAT,
        "inputs": [
            {"name": each.name, "type": _type_name(each.dtype), "shape": each.shape} for each in model.inputs
        ],
        "outputs": _outputs(model),
        "missing": list(config.data.missing),
        "dense": [
            {**asdict(encoding), "source": column.source}
            for encoding, column in zip(encoder.dense, dense, strict=True)
        ],
        "sparse": [
            {
                **asdict(replace(encoding, values=None)),
                "values": [*encoding.values] if encoding.values else [],
                "sources": column.sources,
                "kind": column.kind,
                "multi_hot_separator": column.separator,
                "weight_separator": column.arguments.get("separator", ":"),
                "max_ids": column.max_ids,
                "too_many_ids": column.too_many_ids,
            }
            for encoding, column in zip(encoder.sparse, sparse, strict=True)
        ],
    }
    text = json.dumps(content, ensure_ascii=False, indent=1)
    write_bytes(folder / PREPROCESSING_FILE, text.encode())
    return [PREPROCESSING_FILE]


def _outputs(model: TrainedModule) -> list[dict[str, Any]]:
    outputs = []
    tasks = model.trained.config.all_tasks
    for output, (name, task) in zip(prediction_names(tasks), tasks.items(), strict=True):
        shapes = {output: [SAMPLES, task.classes] if task.kind == "classes" else [SAMPLES]}
        if task.kind == "retrieval":
            shapes |= {key: [SAMPLES, task.num_outputs // 2] for key in ("user_vector", "item_vector")}
        of_task = {"type": _type_name(model.dtype), "task": name, "kind": task.kind}
        outputs += [{"name": key, "shape": shape, **of_task} for key, shape in shapes.items()]
    return outputs


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
