"""The configuration of a run: keys, rules between keys, and TOML files. No module here imports torch.

Start with ``sections``, ``data_sections``, ``table_sections`` and ``task_sections``: all keys with their
defaults, rules and meanings. ``key`` has the classes of a key and of a value such as ``adam(eps = 1e-6)``.
``loading`` reads TOML and ``--set`` into a ``RunConfig``, and ``validation`` has the rules between keys.
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
