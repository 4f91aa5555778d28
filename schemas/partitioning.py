"""Which partition follows from a name: the home of a group, the inbox slot of an executor.

Keeps true: it is a function of the name alone, whoever asks: the partition into which Kafka's default partitioner puts
a record with the name as its key.
"""

_M = 0x5BD1E995
_SEED = 0x9747B28C
_WORD = 0xFFFFFFFF


def home_partition(group_id: str, partitions: int) -> int:
    """Return the home of a group among this number of home partitions."""
    return _partition_of(group_id, partitions)


def inbox_slot(worker: str, slots: int) -> int:
    """Return the default inbox slot of an executor among this number of slots; several executors may have the same."""
    return _partition_of(worker, slots)


def murmur2(data: bytes) -> int:
    """The 32-bit MurmurHash2 that Kafka's clients use, as an unsigned number."""
    whole = len(data) & ~3
    digest = _SEED ^ len(data)
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _M & _WORD
        word = (word ^ word >> 24) * _M & _WORD
        digest = (digest * _M & _WORD) ^ word
    if tail := data[whole:]:
        digest = (digest ^ int.from_bytes(tail, "little")) * _M & _WORD
    digest = (digest ^ digest >> 13) * _M & _WORD
    return digest ^ digest >> 15


def _partition_of(key: str, partitions: int) -> int:
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
