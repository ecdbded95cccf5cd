"""Dense nets, and what computes them: a net's own affairs, whoever trains it.

Begin with ``nets``: three stages each; ``configured`` builds the one that is asked for (``own_net``: the
user's). ``optimizer`` steps a net, ``matmul`` says whose products it takes, ``compiled`` gives it another
form, ``device`` says where it computes, ``remote`` hosts one on a worker. ``replicas`` and ``tensor`` spread
one over devices and over trainers. ``training`` puts these together.
"""
