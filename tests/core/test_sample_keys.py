import numpy as np

from samecurve.core.determinism.sample_keys import row_keys


def test_a_key_belongs_to_its_sample() -> None:
    """Asked for alone, in another order or beside others, a sample has the same key.

    The numbers are fixed: masks of old runs depend on them.
    """
    ids = np.random.default_rng(0).permutation(1000).reshape(10, 100)
    keys = row_keys(3, 2, ids)
    assert keys.shape == ids.shape
    assert keys.dtype == np.int64
    assert all(row_keys(3, 2, np.array([ids[i, i]]))[0] == keys[i, i] for i in range(10))
    assert row_keys(0, 0, np.array([0, 1, 2**62])).tolist() == [
        1873292843429313585,
        3117983553016955638,
        126035918928767061,
    ]


def test_keys_differ_and_are_well_mixed() -> None:
    """Over seeds, epochs and neighbouring samples; each of the 63 bits is set half of the time,
    whatever its neighbours'.
    """
    keys = np.stack(
        [row_keys(seed, epoch, np.arange(5000)) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1)]
    )
    assert len(np.unique(keys)) == keys.size
    assert keys.min() >= 0
    bits = (keys.ravel()[:, None] >> np.arange(63) & 1) - 0.5
    assert np.abs(bits.mean(0)).max() < 2.5 / np.sqrt(keys.size)
    alike = bits.T @ bits / keys.size - 0.25 * np.eye(63)
    assert np.abs(alike).max() < 0.25 * 5.5 / np.sqrt(keys.size)
    flipped = (keys[:, 1:] ^ keys[:, :-1])[..., None] >> np.arange(63) & 1
    assert np.abs(flipped.mean((0, 1)) - 0.5).max() < 2.5 / np.sqrt(flipped[..., 0].size)
