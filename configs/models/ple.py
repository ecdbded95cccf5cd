"""PLE on two labels: python configs/models/ple.py [--census adult.data adult.test]"""

import two_tasks

from hybrid.models.ple import PLE

if __name__ == "__main__":
    two_tasks.main(lambda width: PLE(width, task_outputs=(1, 1)))
