"""ESMM: the probability of a conversion after a click, learned from all impressions.

Ma et al. 2018, "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion
Rate" (arXiv 1804.07931), equations 1 to 3. Conversions are observed for clicked samples only, but a served
model scores all samples. The conversion rate is therefore trained as a factor of p(click and conversion), for
which all samples have labels::

    p(click and conversion | x) = p(click | x) * p(conversion | click, x)
    loss = log loss(p(click), click)  +  log loss(p(click and conversion), click * conversion)

Both towers share the embedding tables, so the many clicks train the vectors that predict the few conversions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid.models.layers import output_mlp


class ESMM(nn.Module):
    """The model: two towers, for the logit of a click and for the logit of a conversion given a click."""

    def __init__(self, width: int, hidden: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.click = output_mlp((width, *hidden))
        self.conversion = output_mlp((width, *hidden))

    def forward(self, inputs_BE: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(click_B, conversion_B)``, the logits of p(click) and p(conversion | click)."""
        return self.click(inputs_BE), self.conversion(inputs_BE)


def both_log_probabilities(click_B: Tensor, conversion_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of p(click and conversion) and of its complement, from the two logits.

    Both are finite even if a probability rounds to 0 or 1.
    """
    log_click_B = F.logsigmoid(click_B)
    log_both_B = log_click_B + F.logsigmoid(conversion_B)
    return log_both_B, torch.logaddexp(F.logsigmoid(-click_B), log_click_B + F.logsigmoid(-conversion_B))


def entire_space_loss(
    click_B: Tensor, conversion_B: Tensor, clicked_B: Tensor, converted_B: Tensor
) -> Tensor:
    """Return ``losses_B``, the sum of the two log losses of each sample.

    Args:
        click_B, conversion_B: logits, as :class:`ESMM` returns them.
        clicked_B, converted_B: labels, 1.0 or 0.0; a sample without a click has no conversion.
    """
    log_both_B, log_not_both_B = both_log_probabilities(click_B, conversion_B)
    click_loss_B = F.binary_cross_entropy_with_logits(click_B, clicked_B, reduction="none")
    return click_loss_B - converted_B * log_both_B - (1 - converted_B) * log_not_both_B
