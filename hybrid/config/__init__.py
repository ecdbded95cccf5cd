"""The configuration of a run: which keys there are, how it is read, and what must hold of it. No torch.

Begin with ``sections``: every key with its default, rule and meaning (``key``). ``file`` reads TOML and
``--set`` into a ``RunConfig``, which ``rules`` look over as a whole, and ``page`` describes all keys.
The command line reads configurations; everything else is given a ``RunConfig``, or one section of it.
"""

from hybrid.config.sections import (
    COMPILERS,
    DDP_MODES,
    DTYPES,
    FORMATS,
    NETS,
    OWN_FUNCTION,
    PARALLEL_FORMS,
    SCHEDULES,
    TABLE_OPTIMIZERS,
    UPDATE_MODES,
    CheckpointSection,
    ClusterSection,
    DataSection,
    DenseSection,
    EmbeddingSection,
    ProfileSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TableSection,
    TrainSection,
)

__all__ = [
    "COMPILERS",
    "DDP_MODES",
    "DTYPES",
    "FORMATS",
    "NETS",
    "OWN_FUNCTION",
    "PARALLEL_FORMS",
    "SCHEDULES",
    "TABLE_OPTIMIZERS",
    "UPDATE_MODES",
    "CheckpointSection",
    "ClusterSection",
    "DataSection",
    "DenseSection",
    "EmbeddingSection",
    "ProfileSection",
    "RunConfig",
    "RunSection",
    "ScheduleSection",
    "TableSection",
    "TrainSection",
]
