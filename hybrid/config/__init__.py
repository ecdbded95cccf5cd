"""The configuration of a run: which keys there are, how it is read, and what must hold of it. No torch.

Begin with ``sections``, and what it puts together (``data``, ``tables``, ``tasks``): every key with its
default, rule and meaning (``key``). ``file`` reads TOML and ``--set`` into a ``RunConfig``, which ``rules``
look over as a whole, and ``page`` describes all keys. The command line reads configurations; everything else
is given a ``RunConfig``, or one section of it.
"""

from hybrid.config.data_sections import ColumnSection as ColumnSection, DataSection as DataSection
from hybrid.config.sections import (
    CheckpointSection as CheckpointSection,
    ClusterSection as ClusterSection,
    DenseGroupSection as DenseGroupSection,
    DenseSection as DenseSection,
    ProfileSection as ProfileSection,
    RunConfig as RunConfig,
    RunSection as RunSection,
    ScheduleSection as ScheduleSection,
    TrainSection as TrainSection,
)
from hybrid.config.table_sections import EmbeddingSection as EmbeddingSection, TableSection as TableSection
from hybrid.config.task_sections import TaskSection as TaskSection
