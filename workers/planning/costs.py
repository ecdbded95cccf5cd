"""What a step costs each role: seconds of a processor, and memory, linear in the terms of its demand.

The coefficients are measured: ``scripts/bench scaling`` fits them, and writes the file that
:meth:`Costs.read` takes. Those in ``costs.toml`` beside this file are of the machine that it names.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from workers.planning.demand import TRAINER_TERMS, WORKER_TERMS, Terms

MEASURED = Path(__file__).with_name("costs.toml")
TRAINER_MEMORY_TERMS = ("step", "value")
WORKER_MEMORY_TERMS = ("step", "byte")
_SECTIONS = {
    "trainer_seconds": TRAINER_TERMS,
    "worker_seconds": WORKER_TERMS,
    "trainer_bytes": TRAINER_MEMORY_TERMS,
    "worker_bytes": WORKER_MEMORY_TERMS,
}


@dataclass(frozen=True)
class Costs:
    """Coefficients, each of one unit of a term.

    Attributes:
        origin: processor and date of the measurement.
        busy: share of a step in which its slowest part works; the rest is waiting.
        trainer_seconds, worker_seconds: CPU-seconds of a step.
        trainer_bytes, worker_bytes: memory beside tables; the term "step" is the process itself.
    """

    origin: str
    busy: float
    trainer_seconds: Terms
    worker_seconds: Terms
    trainer_bytes: Terms
    worker_bytes: Terms

    @classmethod
    def read(cls, path: Path = MEASURED) -> Costs:
        """The coefficients in a file; ConfigError where there is none, or one that is not right."""
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("--costs", f"cannot be read: {error.strerror}", str(path)) from error
        except ValueError as error:
            raise ConfigError("--costs", f"is not TOML: {error}", str(path)) from error
        expected = {"origin", "busy", *_SECTIONS}
        if found.keys() != expected or not (isinstance(found["origin"], str) and _is_share(found["busy"])):
            rule = f"must hold {', '.join(sorted(expected))}, as scripts/bench scaling writes them"
            raise ConfigError("--costs", rule, str(path))
        for section, terms in _SECTIONS.items():
            if not _are_costs(found[section], terms):
                rule = f"[{section}] must hold {', '.join(terms)}, none of them negative"
                raise ConfigError("--costs", rule, str(path))
        return cls(**found)

    def write(self, path: Path) -> None:
        """Write the file that :meth:`read` takes."""
        lines = [f'origin = "{self.origin}"', f"busy = {self.busy:.3g}"]
        for section, terms in _SECTIONS.items():
            values: Terms = getattr(self, section)
            lines += ["", f"[{section}]", *(f"{term} = {values[term]:.4g}" for term in terms)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def cost(coefficients: Terms, terms: Terms) -> float:
    """The sum over those terms that have a coefficient."""
    return sum(value * terms[term] for term, value in coefficients.items())


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


def _are_costs(section: Any, terms: Collection[str]) -> bool:
    return (
        isinstance(section, Mapping)
        and section.keys() == set(terms)
        and all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in section.values())
    )
