"""Which layer of a net it was."""

import traceback

from torch import nn


def name_layer(error: BaseException, *nets: nn.Module) -> None:
    """Add to an exception a note of the layer in whose forward pass it was raised, if it was in one.

    Args:
        nets: whose layers have names; where one has several, that of the first net.
    """
    names = {module: name for net in reversed(nets) for name, module in net.named_modules() if name}
    found: nn.Module | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            found = module
    if found is not None:
        error.add_note(f"in {names[found]} of the net, {_kind(found)}")


def _kind(module: nn.Module) -> str:
    """``Linear(48, 64)``, without what the layers in it are."""
    extra = module.extra_repr()
    return f"{type(module).__name__}({extra})" if extra else type(module).__name__
