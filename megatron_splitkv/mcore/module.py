"""`SplitKVAttention`: core attention of a Megatron layer, beside TP, PP, DP and EP."""

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_splitkv.attention import SplitKVContext, splitkv_attention
from megatron_splitkv.errors import UnsupportedError
from megatron_splitkv.mcore.plans import PlanBook
from megatron_splitkv.mcore.refusals import (
    refuse_missing_kernels,
    refuse_other_mask,
    refuse_unsupported_call,
    refuse_unsupported_config,
    refuse_unsupported_layer,
)
from megatron_splitkv.plan import Causal, Full, Plan, Queries, Window
from megatron_splitkv.plan.report import AttentionShape

OnCall = Callable[[Plan, AttentionShape, str], None]


class SplitKVAttention(MegatronModule):
    """Drop-in core attention of a layer spec, built with Megatron's own arguments.

    Without parameters, except `softmax_offset` where `softmax_type` is "learnable"; state-dict
    keys are those of the stock module.

    Built from the subclass that `with_book` makes: layers, batch and rotary positions of a model
    must ask one book.

    Attributes:
        book: where plans come from.
        on_call: if set, told of each call, on every rank, the plan, the shape, and what rows
            travel by.
    """

    book: ClassVar[PlanBook]
    on_call: ClassVar[OnCall | None] = None

    def __init__(  # noqa: PLR0913 (the parameters are those of Megatron)
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Takes what Megatron passes to core attention.

        Args:
            config: the model's configuration.
            layer_number: counted from 1; chooses window layers.
            attn_mask_type: causal, padding_causal or no_mask.
            attention_type: "self".
            attention_dropout: must be 0; None takes the configuration's.
            softmax_scale: factor of the logits; None takes `1 / sqrt(k_channels)`.
            k_channels: dim of a key head; None takes `config.kv_channels`.
            v_channels: dim of a value head; None takes that of the keys.
            cp_comm_type: not used; Split-KV is its own way of communicating.
            pg_collection: process groups with `tp` and `cp`; None takes Megatron's global ones.
        Raises:
            UnsupportedError: a setting that Split-KV would not honour.
        """
        super().__init__(config=config)
        refuse_unsupported_config(config, attention_dropout)
        refuse_unsupported_layer(attention_type, attn_mask_type, config)
        if not hasattr(self, "book"):
            raise ValueError(
                "SplitKVAttention has no book of plans; build SplitKVAttention.with_book(book), or "
                "put it into a spec with apply_to_spec(spec, book)"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.pg_collection = groups
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.queries = _layer_queries(config, layer_number, attn_mask_type)
        head_dim = k_channels or config.kv_channels
        refuse_missing_kernels(config, head_dim, v_channels or head_dim)
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self._make_softmax_offset(config.num_attention_heads // self.tp_group.size())
        self.register_load_state_dict_pre_hook(_drop_extra_state)

    @classmethod
    def with_book(cls, book: PlanBook, on_call: OnCall | None = None) -> "type[SplitKVAttention]":
        """A subclass that takes its plans and settings from `book`."""
        static_on_call = None if on_call is None else staticmethod(on_call)
        return type(cls.__name__, (cls,), {"book": book, "on_call": static_on_call})

    def _make_softmax_offset(self, num_heads: int) -> None:
        self.softmax_offset: Tensor | None = None
        if self.config.softmax_type == "vanilla":
            return
        options = {"device": torch.cuda.current_device(), "dtype": self.config.params_dtype}
        if self.config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(num_heads, **options)
            return
        del self.softmax_offset
        self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, **options))
        if self.config.perform_initialization:
            self.config.init_method(self.softmax_offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's tokens to the whole sequence.

        Args:
            query: `[s, b, Hq, D]`, packed `[t, Hq, D]`; this rank's tokens in plan order, heads
                of this tensor-parallel rank.
            key, value: `[s, b, Hkv, D]` and `[s, b, Hkv, Dv]`, packed without `b`.
            attention_mask: must be None; documents come as cu_seqlens.
            attn_mask_type: None, or the layer's own mask.
            attention_bias: must be None.
            packed_seq_params: Megatron's own, with the global cu_seqlens; None when not packed.
        Returns:
            `[s, b, Hq * Dv]`, packed `[t, Hq * Dv]`.
        Raises:
            UnsupportedError: a mask or bias that Split-KV would not honour.
            ValueError: the tensors do not fit the plan.
        """
        refuse_unsupported_call(attention_mask, attention_bias)
        if attn_mask_type is not None:
            refuse_other_mask(attn_mask_type, self.attn_mask_type)
        if packed_seq_params is not None:
            out = self._attend(query, key, value, self._packed_plan(query, packed_seq_params))
            return out.flatten(1)
        seq_len, batch_size = query.shape[:2]
        plan = self.book.unpacked(
            seq_len * self.cp_group.size(), batch_size, self.cp_group, query.device
        )
        rows = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        out = self._attend(*rows, plan)
        return out.view(batch_size, seq_len, -1).transpose(0, 1).contiguous()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        if self.on_call is not None:
            name = self.book.transport_name(self.cp_group, q.device)
            self.on_call(plan, attention_shape(q, v), name)
        out, _ = splitkv_attention(
            *without_company(q, k, v), self._context(plan, q.device),
            softmax_scale=self.softmax_scale,
            sink=None if self.softmax_offset is None else self.softmax_offset.float(),
        )  # fmt: skip
        return out

    def _context(self, plan: Plan, device: torch.device) -> SplitKVContext:
        return self.book.context(plan, self.cp_group, device, self.queries)

    def _packed_plan(self, query: Tensor, params: PackedSeqParams) -> Plan:
        if params.cu_seqlens_q_padded is not None and self.queries == Full():
            raise UnsupportedError(
                "cu_seqlens_q_padded under attn_mask_type=no_mask is not supported by split-kv "
                "attention, because every row would see the pads; pack documents without padding"
            )
        plan = self.book.packed(layout_cu_seqlens(params), self.cp_group)
        own = plan.tokens[self.cp_group.rank()]
        if len(query) != own:
            raise ValueError(
                f"query has {len(query)} tokens, but cu_seqlens ends at {plan.num_tokens}, which "
                f"gives this context-parallel rank {own}; was the batch sharded by split-kv?"
            )
        if self.book.packed(kv_cu_seqlens(params), self.cp_group) != plan:
            raise UnsupportedError(
                "packed_seq_params with cu_seqlens_kv unlike cu_seqlens_q is not supported by "
                "split-kv attention, which replaces self-attention; give both the same documents"
            )
        return plan

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Entries of a distributed checkpoint: those of the stock module."""
        is_learnable = self.config.softmax_type == "learnable"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True) if is_learnable else {},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def _drop_extra_state(
    module: torch.nn.Module, state_dict: dict[str, object], prefix: str, *rest: object
) -> None:
    """Transformer Engine's attention saves its fp8 scales, none here, in `torch` checkpoints."""
    state_dict.pop(f"{prefix}_extra_state", None)


def without_company(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, those copied whose memory also holds what is none of them.

    Keys and values come as views of the fused projection, often beside a query that went on as a
    copy. Kept for the backward pass, such a view would keep all of the projection.
    """
    if not torch.is_grad_enabled():  # nothing is kept
        return tensors
    ours: Counter[int] = Counter()
    for tensor in tensors:
        ours[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    return tuple(
        tensor.clone(memory_format=torch.contiguous_format)
        if ours[storage.data_ptr()] < storage.nbytes()
        else tensor
        for tensor, storage in ((tensor, tensor.untyped_storage()) for tensor in tensors)
    )


def attention_shape(q: Tensor, v: Tensor) -> AttentionShape:
    """What a travelling row of these tensors weighs."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return AttentionShape(
        num_heads_q=q.shape[1],
        num_heads_kv=v.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_v=v.shape[2],
        dtype=names[q.dtype],
    )


def layout_cu_seqlens(params: PackedSeqParams) -> Tensor:
    """The boundaries by which tokens lie in memory: the padded ones where there are any.

    Pads sit at a document's tail and attention is causal, so no real token sees one.

    Raises:
        UnsupportedError: another format than thd, or a group that changes by microbatch.
    """
    if params.qkv_format != "thd" or params.local_cp_size is not None:
        raise UnsupportedError(
            f"packed_seq_params with qkv_format={params.qkv_format!r} and local_cp_size="
            f"{params.local_cp_size} is not supported by split-kv attention; pack documents as "
            "thd and leave out --hybrid-context-parallel"
        )
    padded = params.cu_seqlens_q_padded
    return params.cu_seqlens_q if padded is None else padded


def kv_cu_seqlens(params: PackedSeqParams) -> Tensor:
    """Like `layout_cu_seqlens`, for the keys; where Megatron names none, those of the queries."""
    for cu_seqlens in (params.cu_seqlens_kv_padded, params.cu_seqlens_kv):
        if cu_seqlens is not None:
            return cu_seqlens
    return layout_cu_seqlens(params)


def _layer_queries(
    config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType
) -> Queries:
    is_window = is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    )
    if attn_mask_type == AttnMaskType.no_mask:
        return Full()
    return Window(config.window_size[0] + 1) if is_window else Causal()
