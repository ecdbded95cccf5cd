"""Custom training loops: a script's module and loop on a cluster, or in one process.

Data flow of an id, module by module::

    cluster            the interface of a script: connect, distribute, batches, backward
    global_batches     the script's batches, cut into one slice per trainer (prepared_batches: from files)
    embedding_modules  a table is called with ids of the slice
    call_sites         which part of a batch each table is called with, to look it up before the module runs
    forward_pass       the vectors of a call: looked up ahead, or now
    training_loop      the step: backward pass, update decision, optimizer
    backend            holds the rows: this process, or a cluster (package ``workers``)
"""
