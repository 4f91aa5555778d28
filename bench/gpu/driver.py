"""Calls of the CUDA driver that torch does not offer: virtual memory, and streams on a part of a GPU."""

import time
from collections.abc import Callable
from typing import Any

from bench.gpu.report import Unavailable, require

NAMES = (
    "cuDeviceGet",
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
)
"""The calls that the checks use."""


class Driver:
    """The calls of `cuda.bindings.driver` by name. Each call is timed, and raises RuntimeError for an error."""

    def __init__(self) -> None:
        """Load the calls. Raises Unavailable without cuda.bindings, or if it lacks a call."""
        driver = require("cuda.bindings.driver")
        if lacking := [name for name in NAMES if not hasattr(driver, name)]:
            raise Unavailable(f"cuda.bindings has no {', '.join(lacking)}")
        self.types = driver
        self.seconds: dict[str, list[float]] = {}
        """Wall time of each call, by name."""

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        function = getattr(self.types, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            began = time.perf_counter()
            status, *results = function(*arguments)
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)
            if int(status) != 0:
                raise RuntimeError(f"{name}: {status}")
            return tuple(results)

        return call

    def stream_on(self, multiprocessors: int) -> int:
        """Return the handle of a new stream whose kernels run on this many multiprocessors (a green context)."""
        device = self.cuDeviceGet(0)[0]
        whole = self.cuDeviceGetDevResource(device, self.types.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)[0]
        part = self.cuDevSmResourceSplitByCount(1, whole, 0, multiprocessors)[0][0]
        described = self.cuDevResourceGenerateDesc([part], 1)[0]
        created = self.types.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self.cuGreenCtxCreate(described, device, created)[0]
        flag = self.types.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self.cuGreenCtxStreamCreate(context, flag, 0)[0])
