"""What upstream says in every run without Transformer Engine, by name: hidden, so that any other warning is
seen."""

from __future__ import annotations

import logging
import warnings

WARNINGS = (  # regular expressions, from the start of the message
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"absl\.logging is not installed",
    r"(\"\\-\" is an )?invalid escape sequence",
    r"full scope is deprecated",
    r"MimoModelConfig is experimental",
)
LOGGED = (
    "GPTModel IS DEPRECATED",
    "DistributedDataParallel: full_param_layout not provided",
)
ON_CPU = (
    "CPU RNG state changed within GPU RNG context",  # there the two are the same
    "No CUDA runtime is found",
    "When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE_MAX",
)


def hush(cuda: bool) -> None:
    """Hide the messages above from standard error."""

    def shown(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(hidden)

    for text in WARNINGS if cuda else WARNINGS + ON_CPU:
        warnings.filterwarnings("ignore", message=text)
    hidden = LOGGED if cuda else LOGGED + ON_CPU
    handler = logging.StreamHandler()
    handler.addFilter(shown)
    logging.getLogger("torch.utils.cpp_extension").addFilter(shown)  # torch has a handler of its own
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
