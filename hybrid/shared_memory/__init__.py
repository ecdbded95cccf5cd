"""Memory that roles of one host share.

``tensor_blocks`` copies the large tensors of a connection. ``shared_slots`` sums the dense gradients of the
trainers of a host.
"""
