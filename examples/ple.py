"""PLE on two labels.

Run it by ``python examples/ple.py``, or on a cluster by
``hybrid run examples/ple.py --trainers 2 --workers 2``.
``--census adult.data adult.test`` trains on UCI's census data instead of synthetic labels.
"""

import two_tasks

from hybrid.models.ple import PLE

if __name__ == "__main__":
    two_tasks.main(lambda width: PLE(width, task_outputs=(1, 1)))
