"""Give a test's memory back, so that many processes share one GPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
