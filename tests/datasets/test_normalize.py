from __future__ import annotations

import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.types import DataInfo
from tests.datasets.samples import random_images

INFO = DataInfo(10, 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
CONFIG = DataConfig(name="synthetic")


def test_bytes_are_scaled_shifted_and_divided() -> None:
    images = random_images(4)
    mean, std = torch.tensor(INFO.mean).view(3, 1, 1), torch.tensor(INFO.std).view(3, 1, 1)
    out = Normalize(INFO, CONFIG)(images)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, (images.float() / 255 - mean) / std)


def test_the_files_values_override_the_data_sets() -> None:
    config = DataConfig.model_validate(
        {"name": "synthetic", "normalize": {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}}
    )
    images = random_images(4)
    assert torch.equal(Normalize(INFO, config)(images), images.float() / 255)


def test_fp64_and_channels_last_are_honoured() -> None:
    out = Normalize(INFO, CONFIG, torch.float64, channels_last=True)(random_images(4))
    assert out.dtype == torch.float64
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_float_images_count_as_normalised() -> None:
    images = torch.randn(2, 3, 4, 4)
    assert torch.equal(Normalize(INFO, CONFIG)(images), images)
    assert Normalize(INFO, CONFIG, torch.float64)(images).dtype == torch.float64


def test_wrong_number_of_values_is_refused() -> None:
    config = DataConfig.model_validate({"name": "synthetic", "normalize": {"mean": [0.5], "std": [0.5]}})
    with pytest.raises(BadFileError, match=r"data\.normalize\.mean: .* 3 channels"):
        Normalize(INFO, config)
