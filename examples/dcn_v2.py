"""DCN-v2 on a click log.

Run it by ``python examples/dcn_v2.py``, or on a cluster by
``hybrid run examples/dcn_v2.py --trainers 2 --workers 2``.
``--config FILE`` trains on the click log of a configuration instead of the built-in one.
"""

import click_log

from hybrid.models.dcn_v2 import DCNv2

if __name__ == "__main__":
    click_log.main(lambda num_dense, num_vectors: DCNv2(num_dense + num_vectors * click_log.DIM))
