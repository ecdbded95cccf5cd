"""ESMM: how likely a click becomes a conversion, learned from all impressions.

Ma et al. 2018, "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion
Rate" (arXiv 1804.07931), equations 1 to 3. A conversion is known of clicked samples alone, but a served model
scores all. So the rate of conversion is never fitted by itself, but as a factor of what is known of all::

    p(click and conversion | x) = p(click | x) * p(conversion | click, x)
    loss = log loss(p(click), click)  +  log loss(p(click and conversion), click * conversion)

Both towers read the same vectors, so that the few conversions profit from what the many clicks have taught.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid.models.mlp import output_mlp


class ESMM(nn.Module):
    """Logits of a click, and of a conversion if there is a click.

    Args:
        width: of the inputs.
        hidden: widths of the layers of each of the two towers.
    """

    def __init__(self, width: int, hidden: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.click = output_mlp((width, *hidden))
        self.conversion = output_mlp((width, *hidden))

    def forward(self, inputs_BE: Tensor) -> tuple[Tensor, Tensor]:
        """``(click_B, conversion_B)``, the logits of p(click) and p(conversion | click)."""
        return self.click(inputs_BE), self.conversion(inputs_BE)


def both_log_probabilities(click_B: Tensor, conversion_B: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of p(click and conversion) and of 1 less that, from the logits of the two factors.

    Finite, and exact to the last digits, wherever the logits are finite: 1 - pq is (1 - p) + p (1 - q).
    """
    log_click_B = F.logsigmoid(click_B)
    log_both_B = log_click_B + F.logsigmoid(conversion_B)
    return log_both_B, torch.logaddexp(F.logsigmoid(-click_B), log_click_B + F.logsigmoid(-conversion_B))


def entire_space_loss(
    click_B: Tensor, conversion_B: Tensor, clicked_B: Tensor, converted_B: Tensor
) -> Tensor:
    """The sum of the two log losses of each sample, ``losses_B``.

    Args:
        click_B, conversion_B: logits, as :class:`ESMM` gives them.
        clicked_B, converted_B: 1 or 0; what is not clicked on does not convert.
    """
    log_both_B, log_not_both_B = both_log_probabilities(click_B, conversion_B)
    click_loss_B = F.binary_cross_entropy_with_logits(click_B, clicked_B, reduction="none")
    return click_loss_B - converted_B * log_both_B - (1 - converted_B) * log_not_both_B
