"""The configuration of a run: its keys, how it is read, and the rules between keys. Nothing imports torch.

Start with ``sections`` and the other modules of sections: every ``key`` with its default, rule and meaning.
``key`` also reads values with arguments. ``loading`` reads TOML and ``--set`` into a ``RunConfig``, and
``validation`` checks it. ``former_keys`` translates configurations of former versions.
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
