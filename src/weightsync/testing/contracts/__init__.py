"""Contract suites: what every implementation of an interface has to keep, as tests to inherit.

    class TestMyLoader(WeightLoaderContract):
        def make_loader(self) -> WeightLoader: ...
        def make_weights(self, seed: int) -> dict[str, torch.Tensor]: ...

Each suite is an abstract class with one or two hooks that build the implementation, in a file an axis. A suite speaks
to it through the interface alone, waits for events and never for time to pass, and ends within seconds.
"""

from weightsync.testing.contracts.cases import bytes_of, manifest_of
from weightsync.testing.contracts.client import InferenceEngineClientContract, ScriptedEngine
from weightsync.testing.contracts.codec import CodecContract
from weightsync.testing.contracts.extractor import WeightExtractorContract
from weightsync.testing.contracts.loader import WeightLoaderContract
from weightsync.testing.contracts.transfer import WeightTransferContract

__all__ = [
    "CodecContract",
    "InferenceEngineClientContract",
    "ScriptedEngine",
    "WeightExtractorContract",
    "WeightLoaderContract",
    "WeightTransferContract",
    "bytes_of",
    "manifest_of",
]
