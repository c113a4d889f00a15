"""Moving rows between ranks. The only user of torch.distributed."""

from torch.distributed import ProcessGroup

from megatron_splitkv.comm.process_group import (
    HostStagedTransport,
    ProcessGroupTransport,
    transport_of,
)
from megatron_splitkv.comm.rows import (
    RowFormat,
    all_gather_rows,
    check_same_plan,
    chosen_rows,
    gather_rows,
    return_rows,
)
from megatron_splitkv.comm.symmetric import SymmetricTransport
from megatron_splitkv.comm.threads import ThreadGroup, ThreadTransport
from megatron_splitkv.comm.transport import (
    Counts,
    PassingTransport,
    Pending,
    Transport,
    empty_rows,
)

__all__ = [
    "Counts",
    "HostStagedTransport",
    "PassingTransport",
    "Pending",
    "ProcessGroup",
    "ProcessGroupTransport",
    "RowFormat",
    "SymmetricTransport",
    "ThreadGroup",
    "ThreadTransport",
    "Transport",
    "all_gather_rows",
    "check_same_plan",
    "chosen_rows",
    "empty_rows",
    "gather_rows",
    "return_rows",
    "transport_of",
]
