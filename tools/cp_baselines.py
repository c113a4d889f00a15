"""Other context-parallel methods on our own kernels, so that only the method differs.

Short references, exact, each in its natural layout:

- `ring`: keys and values travel from rank to rank (Liu et al. 2023), zig-zag by document; in the
  backward pass their gradients travel with them.
- `all-gather`: every rank gathers all keys and values (Llama 3, section 3.3.2), zig-zag by
  document, in both passes; their gradients go straight to the owners, who sum them. Inside a host
  these are the bytes of a reduce-scatter; between hosts a reduce-scatter would send fewer.
- `ulysses`: tokens are swapped for heads and back (Jacobs et al. 2023).

`split-kv` and `ring` move rows beside compute. `all-gather` and `ulysses` compute when all rows are
there, as their users do: keys and values are needed whole, and no head is cut.

Partial sums travel with as many bits in every method: partial outputs and dq of `split-kv`, dk and
dv of the others.
"""

from collections.abc import Sequence

import numpy as np
import torch
from cp_methods import Gradients, Method, RankInputs, RankPart, Seen, SplitKV
from cp_workloads import Int64Array, Workload, even_split, zigzag_rows, zigzag_tokens
from torch import Tensor
from torch.nn.functional import pad

from megatron_splitkv.comm import Counts, Pending, RowFormat, Transport
from megatron_splitkv.ops import attention_delta, merge_partials_


class Ring(Method):
    """Keys and values go round; see the module."""

    name = "ring"

    def place(self) -> None:
        self.tokens = zigzag_tokens(self.workload.doc_lens, self.cp_size)
        self.rows = zigzag_rows(self.workload, self.cp_size)
        self.intervals = self.row_intervals()

    def part(self, rank: int, transport: Transport | None, device: torch.device) -> RankPart:
        mine = self.intervals[self.rows[rank]]
        steps = [
            _RingStep(
                np.searchsorted(self.tokens[(rank - step) % self.cp_size], mine), step, device
            )
            for step in range(self.cp_size)
        ]
        return _RingPart(self, rank, transport, steps)


class _RingStep:
    """The own rows that see a key of the rank whose keys are here; in the first step all rows."""

    def __init__(self, bounds: Int64Array, number: int, device: torch.device) -> None:
        """Takes `bounds`, `[rows, 2]` key indices."""
        rows = np.flatnonzero((bounds[:, 0] < bounds[:, 1]) | (number == 0))
        self.seen = Seen(bounds[rows], device)
        is_run = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
        self.run = slice(int(rows[0]), int(rows[-1]) + 1) if is_run else None
        self.rows = torch.from_numpy(rows).to(device)
        each = torch.arange(len(rows) + 1, dtype=torch.int32)
        counts = np.zeros(len(bounds) + 1, dtype=np.int32)
        counts[rows + 1] = 1
        self.slots = each[:-1].to(device)
        of_run = each if is_run else torch.from_numpy(np.cumsum(counts, dtype=np.int32))
        self.pointers = of_run.to(device)

    def of(self, x: Tensor) -> Tensor:
        """Their rows of `x`: a view where they are consecutive."""
        return x.index_select(0, self.rows) if self.run is None else x[self.run]

    def merge_into(self, out: Tensor, lse: Tensor, partial: tuple[Tensor, Tensor]) -> None:
        """Joins their partials with what is there."""
        mine = (out, lse) if self.run is None else (out[self.run], lse[self.run])
        merge_partials_(*mine, *partial, self.pointers, self.slots)

    def add_to(self, dq: Tensor, partial: Tensor) -> None:
        """Adds their partial gradients."""
        if self.run is None:
            dq.index_add_(0, self.rows, partial)
        else:
            dq[self.run] += partial


class _RingPart(RankPart):
    def __init__(
        self, method: Ring, rank: int, transport: Transport | None, steps: list[_RingStep]
    ) -> None:
        self.method, self.rank, self.transport, self.steps = method, rank, transport, steps

    def forward(self, inputs: RankInputs) -> Tensor:
        self.q, kv = inputs.q, RowFormat(_fields(inputs.k, inputs.v))
        self.kv_format, self.packed = kv, kv.pack([inputs.k, inputs.v])
        out, lse = self.q.new_empty(0), self.q.new_empty(0)
        held, last = self.packed, len(self.steps) - 1
        for number, step in enumerate(self.steps):
            arriving = self._pass_on(held, number) if number < last else None
            k, v = kv.unpack(held)
            partial = step.seen.attend(step.of(self.q), k, v)
            if number == 0:
                out, lse = partial
            else:
                step.merge_into(out, lse, partial)
            held = held if arriving is None else arriving.wait()
        self.out, self.lse = out.to(self.q.dtype), lse
        return self.out

    def backward(self, dout: Tensor) -> Gradients:
        rows = (self.q, dout, self.lse, attention_delta(dout, self.out))
        k, v = self.kv_format.unpack(self.packed)
        wire = self.method.wire_dtype(k.dtype)
        gradients = RowFormat(((k.shape[1:], wire), (v.shape[1:], wire)))
        dq, dkv = self.q.new_empty(0), list[Tensor]()
        held, last = self.packed, len(self.steps) - 1
        returning: Pending | None = None
        for number, step in enumerate(self.steps):
            arriving = self._pass_on(held, number) if number < last else None
            k, v = self.kv_format.unpack(held)
            q, dout, lse, delta = (step.of(x) for x in rows)
            more, *dkv = step.seen.backward((q, dout, lse, delta), k, v)
            if number == 0:
                dq = more
            else:
                step.add_to(dq, more)
            if returning is not None:
                for mine, theirs in zip(dkv, gradients.unpack(returning.wait()), strict=True):
                    mine += theirs
            if last > 0:  # the last step hands them to their owner
                returning = self._pass_on(gradients.pack(dkv), number)
            held = held if arriving is None else arriving.wait()
        if returning is not None:
            dkv = gradients.unpack(returning.wait())
        dtype = self.q.dtype
        del self.q, self.packed, self.out, self.lse
        return dq.to(dtype), dkv[0].to(dtype), dkv[1].to(dtype)

    def _pass_on(self, rows: Tensor, step: int) -> Pending:
        """Gives what came from rank - step to the next rank."""
        assert self.transport is not None
        size = self.method.cp_size
        counts = np.zeros((size, size), dtype=np.int64)
        for rank in range(size):
            counts[rank, (rank + 1) % size] = len(self.method.tokens[(rank - step) % size])
        return self.transport.exchange(rows, counts)


class AllGather(Method):
    """All keys and values on every rank; see the module."""

    name = "all-gather"

    def place(self) -> None:
        self.tokens = zigzag_tokens(self.workload.doc_lens, self.cp_size)
        self.rows = zigzag_rows(self.workload, self.cp_size)
        self.intervals = self.row_intervals()
        self.by_owner = torch.from_numpy(np.concatenate(self.tokens))
        # Where each token is when every rank has given equally many rows.
        self.width = max(map(len, self.tokens))
        places = [rank * self.width + np.arange(len(own)) for rank, own in enumerate(self.tokens)]
        self.by_token = torch.from_numpy(np.concatenate(places))[self.by_owner.argsort()]

    def part(self, rank: int, transport: Transport | None, device: torch.device) -> RankPart:
        return _AllGatherPart(self, rank, transport, Seen(self.intervals[self.rows[rank]], device))


class _AllGatherPart(RankPart):
    def __init__(
        self, method: AllGather, rank: int, transport: Transport | None, seen: Seen
    ) -> None:
        self.method, self.rank, self.transport, self.seen = method, rank, transport, seen
        device = seen.begin.device
        self.by_owner, self.by_token = method.by_owner.to(device), method.by_token.to(device)

    def forward(self, inputs: RankInputs) -> Tensor:
        self.inputs = inputs
        k, v = self._gathered()
        self.out, self.lse = self.seen.attend(inputs.q, k, v, inputs.q.dtype)
        return self.out

    def backward(self, dout: Tensor) -> Gradients:
        q, dtype = self.inputs.q, self.inputs.q.dtype
        k, v = self._gathered()
        rows = (q, dout, self.lse, attention_delta(dout, self.out))
        dq, dk, dv = self.seen.backward(rows, k, v)
        if self.transport is not None:
            wire = self.method.wire_dtype(dtype)
            row = RowFormat(((k.shape[1:], wire), (v.shape[1:], wire)))
            counts = _from_everyone(self.method.tokens)
            buffer = self.transport.send_buffer(counts, row.row_bytes, k.device)
            sent = row.pack([dk, dv], self.by_owner, into=buffer)
            parts = row.unpack(self.transport.exchange(sent, counts).wait())
            each = (self.method.cp_size, len(self.method.tokens[self.rank]))
            dk, dv = (x.unflatten(0, each).sum(0, dtype=torch.float32) for x in parts)
        del self.inputs, self.out, self.lse
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _gathered(self) -> list[Tensor]:
        """Keys and values of all ranks in the order of the pack."""
        k, v = self.inputs.k, self.inputs.v
        if self.transport is None:
            return [k, v]
        row = RowFormat(_fields(k, v))
        mine = pad(row.pack([k, v]), (0, 0, 0, self.method.width - len(k)))
        gathered = self.transport.all_gather(mine).wait().flatten(0, 1)
        return [x.index_select(0, self.by_token) for x in row.unpack(gathered)]


class Ulysses(Method):
    """Tokens for heads and back; see the module."""

    name = "ulysses"

    def place(self) -> None:
        self.tokens = even_split(self.workload.num_tokens, self.cp_size)
        self.intervals = self.row_intervals()
        self.rows = even_split(len(self.intervals), self.cp_size)

    @classmethod
    def refusal(cls, workload: Workload, cp_size: int) -> str | None:
        heads_q, heads_kv = workload.heads
        if heads_q % cp_size:
            return f"{heads_q} query heads do not divide over {cp_size} ranks"
        if heads_kv % cp_size and cp_size % heads_kv:
            return f"{heads_kv} kv heads neither divide over {cp_size} ranks nor repeat evenly"
        return None

    def part(self, rank: int, transport: Transport | None, device: torch.device) -> RankPart:
        return _UlyssesPart(self, rank, transport, Seen(self.intervals, device))


class _UlyssesPart(RankPart):
    def __init__(self, method: Ulysses, rank: int, transport: Transport | None, seen: Seen) -> None:
        self.method, self.rank, self.transport, self.seen = method, rank, transport, seen
        heads_kv, size = method.workload.heads[1], method.cp_size
        self.is_repeated = heads_kv < size
        self.kv_heads = None  # of each rank in turn, where ranks share them
        if self.is_repeated:
            first = torch.arange(size, device=seen.begin.device)
            self.kv_heads = first * heads_kv // size

    def forward(self, inputs: RankInputs) -> Tensor:
        rows, tokens = self.method.rows, self.method.tokens
        self.q = self._to_heads(inputs.q, rows)
        self.k, self.v = (self._to_heads(x, tokens, self.kv_heads) for x in (inputs.k, inputs.v))
        self.out, self.lse = self.seen.attend(self.q, self.k, self.v, inputs.q.dtype)
        return self._to_rows(self.out, self.out.dtype, rows).flatten(1, 2)

    def backward(self, dout: Tensor) -> Gradients:
        dtype = dout.dtype
        rows, tokens = self.method.rows, self.method.tokens
        dout = self._to_heads(dout, rows)
        state = (self.q, dout, self.lse, attention_delta(dout, self.out))
        dq, *dkv = self.seen.backward(state, self.k, self.v)
        del state, self.q, self.k, self.v, self.out, self.lse
        wire = self.method.wire_dtype(dtype) if self.is_repeated else dtype
        heads_kv = self.method.workload.heads[1]
        dk, dv = (self._to_rows(x, wire, tokens).flatten(1, 2) for x in dkv)
        if self.is_repeated:
            dk, dv = (x.unflatten(1, (heads_kv, -1)).sum(2, dtype=torch.float32) for x in (dk, dv))
        return (
            self._to_rows(dq, dtype, rows).flatten(1, 2), dk.to(dtype), dv.to(dtype)
        )  # fmt: skip

    def _to_heads(
        self, x: Tensor, shares: Sequence[Int64Array], heads: Tensor | None = None
    ) -> Tensor:
        """`[own, H, D]` to `[all, H', D]` with the heads of this rank; `heads` repeats some."""
        if self.transport is None:
            return x
        size = self.method.cp_size
        if heads is not None:
            x = x.index_select(1, heads)
        by_rank = x.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
        row = RowFormat(((by_rank.shape[1:], x.dtype),))
        counts = _from_everyone(shares).T
        buffer = self.transport.send_buffer(counts, row.row_bytes, x.device)
        received = self.transport.exchange(row.pack([by_rank], into=buffer), counts).wait()
        return row.unpack(received)[0]

    def _to_rows(self, x: Tensor, wire: torch.dtype, shares: Sequence[Int64Array]) -> Tensor:
        """`[all, H', D]` to `[own, size, H', D]`: what each rank made of the own rows."""
        if self.transport is None:
            return x[:, None]
        size = self.method.cp_size
        row = RowFormat(((x.shape[1:], wire),))
        counts = _from_everyone(shares)
        buffer = self.transport.send_buffer(counts, row.row_bytes, x.device)
        received = self.transport.exchange(row.pack([x], into=buffer), counts).wait()
        return row.unpack(received)[0].unflatten(0, (size, -1)).transpose(0, 1)


def _from_everyone(shares: Sequence[Int64Array]) -> Counts:
    """Each rank gets as many rows from every rank as its share has."""
    return np.tile(np.asarray([len(share) for share in shares], dtype=np.int64), (len(shares), 1))


def _fields(k: Tensor, v: Tensor) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return ((tuple(k.shape[1:]), k.dtype), (tuple(v.shape[1:]), v.dtype))


METHODS: dict[str, type[Method]] = {
    method.name: method for method in (SplitKV, Ring, AllGather, Ulysses)
}
