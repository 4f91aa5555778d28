"""What of a tensor this process publishes.

Keeps true: over the ranks of a device mesh, every element of a DTensor is owned once. Of what is replicated, the first
rank owns it; of what is sharded, each rank its shard.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.weights.geometry import Box, LayoutError, matrix


def owned(tensor: Tensor) -> tuple[Box, Tensor] | None:
    """Where the owned part lies and its values; None if other ranks own all of it.

    A plain tensor is owned whole. Raises LayoutError for a DTensor that is sharded along another than its first axis or
    holds partial sums.
    """
    rows, columns = matrix(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(0, rows, 0, columns), tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            if mesh.get_local_rank(dimension) != 0:
                return None
        elif not (isinstance(placement, Shard) and placement.dim == 0):
            raise LayoutError(f"a tensor is placed as {placement}: only Shard(0) and Replicate can be published")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if 0 in shape:
        return None
    return Box(offset[0] if offset else 0, matrix(shape)[0], 0, columns), tensor.to_local()
