"""Any number of values a sample as a padded matrix."""

import torch
from support.models import vectors

from hybrid.models.padding import padded


def test_values_are_padded_with_zeros() -> None:
    values_LD = vectors(5, 2, seed=1)
    values_BTD, is_item_BT = padded(values_LD, torch.tensor([0, 2, 2, 5]))
    assert is_item_BT.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    zeros = torch.zeros(2, dtype=torch.float64)
    expected = [values_LD[0], values_LD[1], zeros, zeros, zeros, zeros, *values_LD[2:]]
    torch.testing.assert_close(values_BTD.flatten(0, 1), torch.stack(expected), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad((values_BTD * 3).sum(), values_LD)
    assert (gradient == 3).all()


def test_padding_without_values() -> None:
    for offsets, size in (([0, 0, 0], 2), ([0], 0)):
        values_BTD, is_item_BT = padded(vectors(0, 2, seed=1), torch.tensor(offsets))
        assert (values_BTD.shape, is_item_BT.shape) == ((size, 0, 2), (size, 0))
