"""MMoE on two labels: python configs/models/mmoe.py [--census adult.data adult.test]"""

import two_tasks

from hybrid.models.mmoe import MMoE

if __name__ == "__main__":
    two_tasks.main(lambda width: MMoE(width, task_outputs=(1, 1)))
