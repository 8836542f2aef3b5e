"""Pictures of wrong answers: the surest first, with both classes below; a text if there is none."""

from typing import Any

import numpy as np

from samecurve.tasks.vision.data.image_sets import ImageRows
from samecurve.tasks.vision.wrong_answers import SHOWN, with_text, wrong_answers

CLASSES = ["cat", "dog", "eel"]


def images(count: int, channels: int = 3) -> ImageRows:
    pixels = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2)
    return ImageRows(pixels.repeat(channels, 3), np.zeros(count, np.int64))


def test_the_surest_wrong_answers_come_first() -> None:
    def answer(rows: dict[str, Any]) -> Any:
        """Image n is a cat for even n, else a dog, the surer the larger n."""
        number = rows["pixels"][:, 0, 0, 0].astype(float)
        chances = np.zeros((len(number), 3))
        chances[np.arange(len(number)), (number % 2).astype(int)] = 0.5 + number / 200
        return chances

    for channels in (1, 3):
        pictures: Any = wrong_answers(images(50, channels), answer, CLASSES)
        assert len(pictures) == SHOWN
        assert [int(picture[0, 0, 0]) for picture in pictures] == list(range(49, 49 - 32, -2))
        assert all(picture.dtype == np.uint8 for picture in pictures)
        assert {picture.shape for picture in pictures} == {(112 + 28, 112, 3)}
    assert wrong_answers(images(1), answer, CLASSES) == ["no wrong answer among 1 held-out image"]
    assert wrong_answers(None, answer, CLASSES) == ["no images are held out, so none is answered"]
    floats = with_text(np.full((8, 8, 3), 0.5, np.float32), "cat")
    assert floats[0, 0].tolist() == [128, 128, 128]
