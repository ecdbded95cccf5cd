"""What RPC may bring into a process: only what a role of this run has signed, and of that only plain data.

::

    sender                                             receiver
    ──────                                             ────────
    call, arguments                               function of hybrid.transport, plain data
       │ pickle, tensors beside it (pickler)         ▲ unpickle, by a list of what may be loaded (allowed)
       ▼                                             │
    bytes, tensors                                is it new? (replay)
       │ sign: sender, number, receiver              ▲ whose is it, and for whom? (signature)
       ▼                                             │
       ───────────── torch's RPC, open to whoever can connect ─────────────

What does not pass all of it is refused before anything of it is loaded (refusals); ``failure_text`` tells the
caller. Begin with ``pickler``, through which torch sends and receives once ``wire`` has installed it; all
keys come of one ``secret``.
"""
