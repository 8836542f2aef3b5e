"""The first values of a parameter, as `Initial` says."""

import numpy as np
import pytest

from samecurve import Initial
from samecurve.core.weights import values
from samecurve.errors import UserError


def test_each_equal_part_has_its_mean() -> None:
    for shape in ((6,), (6, 500), (6, 5, 100)):
        plain = values(0, "gates", shape, Initial(0.1))
        shifted = values(0, "gates", shape, Initial(0.1, (0.0, 2.0, -1.0)))
        rows = np.reshape([0, 0, 2, 2, -1, -1], (6, *[1] * (len(shape) - 1)))
        np.testing.assert_array_equal(shifted, plain + np.float32(rows))
        assert shifted.dtype == np.float32
    of_one_value = values(0, "gates", (4,), Initial(0.0, (0.0, 1.5)))
    assert of_one_value.tolist() == [0, 0, 1.5, 1.5]


@pytest.mark.parametrize("shape", [(), (5,)])
def test_parts_that_are_not_equal_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="Initial of gates has 2 means"):
        values(0, "gates", shape, Initial(0.0, (0.0, 1.0)))
