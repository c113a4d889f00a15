"""The exchange of one attention call, cut into stages that overlap with compute."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch import Tensor

from megatron_splitkv.comm import Pending, RowFormat, Transport, gather_rows, return_rows
from megatron_splitkv.layout import ExchangeStage
from megatron_splitkv.wire import PartialFormat


def run_stages[T](
    stages: Sequence[ExchangeStage],
    transport: Transport | None,
    sent: tuple[RowFormat, Sequence[Tensor]],
    answer_format: PartialFormat,
    compute_own: Callable[[], T],
    compute: Callable[[ExchangeStage, Tensor], tuple[Tensor, ...]],
    consume: Callable[[T, ExchangeStage, Tensor], None],
) -> tuple[T, Callable[[], None]]:
    """Own rows, then each stage: gather, compute, return, consume into what the own rows gave.

    The gather of the next stage and the return of the last one are in flight during the compute
    of this one, and no more: buffers are those of two stages. The order of collectives is that of
    the layout, the same on every rank.

    Args:
        stages: of the layout.
        transport: the group; None for a group of one.
        sent: what travels of each own row: its format, and the tensors of its fields.
        answer_format: of what travels back.
        compute_own: partial attention of the own rows.
        compute: answers to the packed rows of a stage, as `answer_format` packs them.
        consume: joins packed answers of the others with what the own rows gave.
    Returns:
        What the own rows gave, and what must be called for the answers to the last stage.
    """
    if transport is None or not stages:
        return compute_own(), lambda: None
    arriving = gather_rows(*sent, stages[0], transport)
    own = compute_own()
    returning: tuple[ExchangeStage, Pending] | None = None
    for stage, following in zip_longest(stages, stages[1:]):
        rows = arriving.wait()
        if following is not None:
            arriving = gather_rows(*sent, following, transport)
        answers = compute(stage, rows)
        buffer = transport.send_buffer(stage.counts.T, answer_format.row_bytes, rows.device)
        packed = answer_format.pack(answers[:1], *answers[1:], into=buffer)
        pending = return_rows(packed, stage, transport)
        del rows, answers, packed
        if returning is not None:
            consume(own, returning[0], returning[1].wait())
        returning = stage, pending
    assert returning is not None, "there is a stage"
    last, pending = returning
    return own, lambda: consume(own, last, pending.wait())
