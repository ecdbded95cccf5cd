"""Wide & Deep on a click log: python configs/models/wide_deep.py"""

import click_log

from hybrid.models.wide_deep import WideAndDeep

if __name__ == "__main__":
    click_log.main(
        lambda num_dense, num_vectors: WideAndDeep(num_dense, [click_log.DIM] * num_vectors),
        click_log.DIM + 1,
    )
