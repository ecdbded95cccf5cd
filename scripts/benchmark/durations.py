"""How long things are measured, and by which products. Free of torch."""

ROUNDS = 3
WARM_UP_STEPS = 10
# Timed steps by workload: some seconds for the fastest system on two cores.
TIMED_STEPS = {"W1": 60, "W2": 160, "W3": 400}
# The precision of dense nets, each in a table of its own, as dense.autocast. A processor that does not
# multiply bfloat16 itself takes ten times as long for it as for float32.
PRODUCTS = {"float32": "none", "bfloat16": "bfloat16"}
USUAL_PRODUCTS = ("float32",)
# One round of these is a first impression: all systems and workloads within three minutes for each of those.
QUICK_WARM_UP_STEPS = 4
QUICK_STEPS = {"W1": 8, "W2": 12, "W3": 40}
