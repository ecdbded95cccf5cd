"""Dense nets and their computation.

``net_builder`` builds the net of a configuration: one of ``hybrid.models``, or a custom net.
``dense_optimizer`` updates nets, ``matmul`` multiplies matrices, ``compilation`` compiles stages, ``devices``
selects devices, and ``hosted_net`` hosts a net on a worker. ``vector_columns`` finds columns in an input,
and ``sync_batch_norm`` normalizes by the global batch. ``data_parallel`` and ``tensor_parallel`` distribute a
net over devices and over trainers. ``hybrid.engine`` combines these.
"""
