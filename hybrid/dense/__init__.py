"""Dense nets, and what computes them: a net's own affairs, whoever trains it.

Begin with ``configured``, which builds the net that is asked for: one of ``models``, or the user's own
(``own_net``), of three stages; ``places`` knows where the vectors of each column lie. ``optimizer`` steps a
net, ``matmul`` says whose products it takes, ``compiled`` gives it another form, ``device`` says where it
computes, ``remote`` hosts one on a worker. ``replicas`` and ``tensor`` spread one over devices and over
trainers. ``training`` puts these together.
"""
