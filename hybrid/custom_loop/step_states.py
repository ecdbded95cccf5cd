"""The states of a custom training loop, and the calls that each state permits.

::

    NEW, IDLE ── next batch ──► FORWARD ── backward ──► BACKWARD ── last ──► REDUCED
      ▲                                                 │      ▲                │ optimizer.step
      │                                        not last ▼      │ backward       ▼
      │                                     ACCUMULATED ──► LATER_FORWARD   COMPLETE
      └──────────────────────────── end of the batch ──────────────────────────┘

"last" means the last micro-batch of a step. If a script leaves the pass in BACKWARD, ACCUMULATED,
LATER_FORWARD or REDUCED, the state becomes INCOMPLETE.
"""

from collections.abc import Mapping
from enum import StrEnum, auto
from typing import NamedTuple


class StepState(StrEnum):
    """The state of a loop between two calls."""

    NEW = auto()  # no batch has been trained
    IDLE = auto()  # the script has no batch
    FORWARD = auto()  # the script has the first micro-batch of a step; no gradients of the step are sent
    LATER_FORWARD = auto()  # the script has a later micro-batch; gradients of earlier ones are sent
    BACKWARD = auto()  # cluster.backward is running
    ACCUMULATED = auto()  # the micro-batch has its gradients; another micro-batch follows
    REDUCED = auto()  # the last micro-batch has its gradients; the decision about the step follows
    COMPLETE = auto()  # the step is decided, and counted; further optimizers may take it
    INCOMPLETE = auto()  # gradients of the step are sent, but the step cannot be completed


class StepCall(NamedTuple):
    """A call that only some states permit. The script, autograd or the loop makes it."""

    transitions: Mapping[StepState, StepState]  # the state after the call, for each state that permits it
    error: str = "a loop does not make this call"  # the error in other states
    errors: Mapping[StepState, str] = {}  # errors for some states, instead of ``error``

    def state_after(self, state: StepState, step: int) -> StepState:
        """Return the state after a call in ``state``. RuntimeError if ``state`` does not permit the call."""
        if state not in self.transitions:
            raise RuntimeError(self.errors.get(state, self.error).format(step=step))
        return self.transitions[state]


_S = StepState
_NOTHING_TO_UPDATE = _S.NEW, _S.IDLE, _S.FORWARD, _S.COMPLETE
_INCOMPLETE = (
    "step {step} is not complete: optimizer.step(), of its last micro-batch, comes first. If the loop was "
    "left after cluster.backward(...), which updates the tables only, call hybrid.connect() again and "
    "distribute a new module"
)
_ONE_STEP = (
    " was not called for the batch of step {step}; each batch takes one step. To add up the gradients of "
    "several batches, yield them as one batch, and set train.micro_batches. To evaluate, iterate under "
    "torch.no_grad()"
)
_NO_BATCH = "cluster.backward(...) takes the loss of a batch of cluster.batches(...)"

RESUME = StepCall({_S.NEW: _S.IDLE}, "cluster.resume(...) is called once, before the first step")
# Before a checkpoint is written or loaded, and before a pass.
FLUSH = StepCall({each: each for each in _NOTHING_TO_UPDATE}, _INCOMPLETE)
NEXT_BATCH = StepCall({_S.NEW: _S.FORWARD, _S.IDLE: _S.FORWARD, _S.ACCUMULATED: _S.LATER_FORWARD})
CALL_TABLE = StepCall(
    {each: each for each in _S if each not in (_S.NEW, _S.IDLE, _S.INCOMPLETE)},
    "a module with tables trains on the batches of cluster.batches(...); call it on other tensors under "
    "torch.no_grad()",
)
BACKWARD = StepCall(
    {_S.FORWARD: _S.BACKWARD, _S.LATER_FORWARD: _S.BACKWARD},
    "cluster.backward(...) is called again for the batch of step {step}: add up the losses of each sample, "
    "or pass further losses as more=[(loss, weights)]",
    dict.fromkeys((_S.NEW, _S.IDLE, _S.INCOMPLETE), _NO_BATCH),
)
# Autograd computes a gradient of a parameter or of a table.
ADD_GRADIENT = StepCall(
    {_S.BACKWARD: _S.BACKWARD},
    "loss.backward() does not train a distributed module: call cluster.backward(loss) with one loss value "
    'per sample (reduction="none"). It takes the mean over the batch of all trainers, and sends the '
    "gradients of the tables to the workers",
)
END_BACKWARD = StepCall({_S.BACKWARD: _S.ACCUMULATED})
END_LAST_BACKWARD = StepCall({_S.BACKWARD: _S.REDUCED})
OPTIMIZER_STEP = StepCall(
    {_S.ACCUMULATED: _S.ACCUMULATED, _S.REDUCED: _S.COMPLETE, _S.COMPLETE: _S.COMPLETE},
    "optimizer.step() comes after cluster.backward(...), once for each batch, and takes no closure (LBFGS)",
)
END_BATCH = StepCall(
    {_S.ACCUMULATED: _S.ACCUMULATED, _S.COMPLETE: _S.IDLE},
    "cluster.backward(...)" + _ONE_STEP,
    {_S.REDUCED: "optimizer.step() of parameters of the module" + _ONE_STEP, _S.INCOMPLETE: _INCOMPLETE},
)
LEAVE_PASS = StepCall(
    {**dict.fromkeys(_S, _S.INCOMPLETE), **dict.fromkeys(_NOTHING_TO_UPDATE, _S.IDLE), _S.NEW: _S.NEW}
)
