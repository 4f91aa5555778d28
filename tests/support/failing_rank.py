"""A worker of vLLM whose rank 1 fails in a step, once the file `FAULT` is in the engine's temporary folder."""

import tempfile
from pathlib import Path
from typing import Any

from rose.workers.executor.vllm.rank_worker import RankWorker

FAULT = "rank-1-fails"


class FailingRank(RankWorker):
    """Computes as its parent until there is a file."""

    def init_device(self) -> None:
        super().init_device()
        sample = self.model_runner.sample_tokens

        def sample_or_fail(*arguments: Any) -> Any:
            if self.rank == 1 and (Path(tempfile.gettempdir()) / FAULT).exists():
                raise MemoryError("no room for the logits")
            return sample(*arguments)

        self.model_runner.sample_tokens = sample_or_fail
