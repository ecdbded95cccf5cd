"""Custom training loops: a script's module and loop on a cluster, or in one process.

The modules, first those that a batch passes through::

    cluster            the interface of a script: connect, distribute, batches, backward, checkpoints
    local_batches      the script's batches, or prepared data, cut into one slice per trainer
    stream_data        the rows of a stream, of which each trainer reads its lanes
    drawn_negatives    items drawn in each step, which are added to the batch
    embedding_modules  a table is called with ids of the slice
    training_loop      the step: vectors of the calls, backward pass, update decision, optimizer
    step_states        the states of the loop, and the calls that each state permits
    trainer_group      collective operations: sums, gathered values, comparison of the trainers' batches
    loop_warnings      warnings about calls of PyTorch that miss the tables
    loop_state         the passes, and the state from which a script resumes
    script_log         the numbers that a script logs
    backend            holds the rows: this process, or a cluster (package ``workers``)
"""
