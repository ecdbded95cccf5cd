"""Numbers of steps and rounds, precisions, and links. Does not import torch."""

ROUNDS = 3
WARM_UP_STEPS = 10
# Timed steps by workload: a few seconds for the fastest system on two cores.
TIMED_STEPS = {"W1": 60, "W2": 160, "W3": 400, "W4": 200, "W5": 80, "W6": 400}
# Precisions of dense nets (dense.autocast), each with a separate table. bfloat16 is ten times as slow as
# float32 on processors without bfloat16 instructions.
PRODUCTS = {"float32": "none", "bfloat16": "bfloat16"}
USUAL_PRODUCTS = ("float32",)
# For --quick: all systems and workloads within three minutes per precision.
QUICK_WARM_UP_STEPS = 4
QUICK_STEPS = {"W1": 8, "W2": 12, "W3": 40, "W4": 40, "W5": 12, "W6": 80}
# Links between hosts: seconds from one to the other, and bits per second.
LINKS = {"none": None, "1ms": (1e-3, 1e10), "5ms": (5e-3, 1e10), "20ms": (2e-2, 1e10), "100Mbit": (1e-4, 1e8)}
