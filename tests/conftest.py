"""One thread: the tests' tensors are small, and so the results do not depend on the machine's number of cores."""

import gconvnext  # noqa: F401  registers the models
import torch

torch.set_num_threads(1)
