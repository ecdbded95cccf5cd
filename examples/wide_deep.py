"""Wide & Deep on a click log.

Run it by ``python examples/wide_deep.py``, or on a cluster by
``hybrid run examples/wide_deep.py --trainers 2 --workers 2``.
``--config FILE`` trains on the click log of a configuration instead of the built-in one.
"""

import click_log

from hybrid.models.wide_deep import WideAndDeep

if __name__ == "__main__":
    click_log.main(
        lambda num_dense, num_vectors: WideAndDeep(num_dense, [click_log.DIM] * num_vectors),
        click_log.DIM + 1,
    )
