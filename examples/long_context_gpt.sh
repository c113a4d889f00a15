#!/usr/bin/env bash
# Pretrains a GPT on real text, its sequences split over CP ranks, through Megatron's own loop.
#
#   examples/long_context_gpt.sh                        what the machine can do: GPUs, or CPU mode
#   CP=4 SEQ_LEN=8192 examples/long_context_gpt.sh      any knob below, from the environment
#   DATA=~/texts examples/long_context_gpt.sh --lr 1e-3 any Megatron argument, passed through
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON="$here/../.venv/bin/python"
    [[ -x "$PYTHON" ]] || PYTHON=python3
fi
read -r gpus has_kernels has_te has_apex < <("$PYTHON" -c '
import contextlib, importlib, sys, torch
from megatron_splitkv.mcore.launch import has_cuda_kernels
def has(name):
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(name)
    except (ImportError, OSError):
        return 0
    return 1
gpus = torch.cuda.device_count()
packages = ("transformer_engine.pytorch", "fused_weight_gradient_mlp_cuda") if gpus else ()
print(gpus, int(has_cuda_kernels()), *map(has, packages))')
if ((gpus > 0 && !has_kernels)) && [[ "${IMPL:-splitkv}" == splitkv ]]; then
    echo "this build of megatron_splitkv has no CUDA kernels: CPU mode, although there are" \
        "$gpus GPUs; IMPL=megatron trains on them" >&2
    export CUDA_VISIBLE_DEVICES=
    gpus=0
fi

# Sizes that suit the machine.
if ((gpus > 0)); then
    default_cp=$gpus default_seq=32768 default_iters=200
    default_layers=24 default_hidden=1024 default_heads=16 default_kv_heads=4 default_lr=6e-4
else
    default_cp=2 default_seq=4096 default_iters=60
    default_layers=4 default_hidden=128 default_heads=4 default_kv_heads=2 default_lr=3e-3
fi

# ---- knobs ----------------------------------------------------------------------------------
IMPL="${IMPL:-splitkv}"                   # context parallelism: splitkv (ours) or megatron
TP="${TP:-1}"                             # tensor-parallel ranks: each layer's weights are cut
PP="${PP:-1}"                             # pipeline stages: the layers are dealt out
CP="${CP:-$default_cp}"                   # context-parallel ranks: each sequence is cut
NPROC="${NPROC:-}"                        # processes here; empty: TP*PP*CP; more: data-parallel
SEQ_LEN="${SEQ_LEN:-$default_seq}"        # tokens of one sequence, a multiple of 2*CP
PACKED="${PACKED:-1}"                     # 1: attention stops at document ends; 0: it does not
BACKEND="${BACKEND:-nccl}"                # between GPUs; gloo is slow and lets processes share one
MICRO_BATCH="${MICRO_BATCH:-1}"           # sequences of one forward pass
GLOBAL_BATCH="${GLOBAL_BATCH:-}"          # sequences of one optimizer step; empty: two passes
TRAIN_ITERS="${TRAIN_ITERS:-$default_iters}" # optimizer steps
LAYERS="${LAYERS:-$default_layers}"       # the model: layers,
HIDDEN="${HIDDEN:-$default_hidden}"       #   width,
HEADS="${HEADS:-$default_heads}"          #   query heads,
KV_HEADS="${KV_HEADS:-$default_kv_heads}" #   key and value heads
LR="${LR:-$default_lr}"                   # peak learning rate
DATA="${DATA:-}"                          # folder of text; empty: Python's standard library
MAX_BYTES="${MAX_BYTES:-$((32 << 20))}"   # text that is taken from it
OUT="${OUT:-$here/out}"                   # where prepared data goes
# ---------------------------------------------------------------------------------------------

refuse() { # what was got, what is needed, the way out
    echo "$1 must be $2; $3" >&2
    exit 2
}
need_multiple() { # a knob, an expression of knobs that must divide it
    local got="${!1}" divisor=$(($2))
    ((got % divisor == 0)) && return
    local near=$(((got / divisor + 1) * divisor))
    refuse "$1=$got" "a multiple of $2=$divisor" "set $1=$near, or change $2"
}

for knob in TP PP CP NPROC SEQ_LEN MICRO_BATCH GLOBAL_BATCH TRAIN_ITERS LAYERS HIDDEN HEADS \
    KV_HEADS MAX_BYTES; do
    if [[ "$knob" == NPROC ]]; then : "${NPROC:=$((TP * PP * CP))}"; fi
    if [[ "$knob" == GLOBAL_BATCH ]]; then
        : "${GLOBAL_BATCH:=$((2 * MICRO_BATCH * NPROC / (TP * PP * CP)))}"
    fi
    [[ "${!knob}" =~ ^[1-9][0-9]{0,11}$ ]] ||
        refuse "$knob=${!knob}" "a whole number, 1 or more, in digits alone" "unset it for a default"
done
[[ "$PACKED" =~ ^[01]$ ]] || refuse "PACKED=$PACKED" "0 or 1" "unset it for a default"
[[ "$BACKEND" =~ ^(nccl|gloo)$ ]] ||
    refuse "BACKEND=$BACKEND" "nccl or gloo" "unset it for a default"
need_multiple NPROC "TP*PP*CP"
need_multiple GLOBAL_BATCH "MICRO_BATCH*(NPROC/(TP*PP*CP))"
need_multiple LAYERS PP
need_multiple HEADS KV_HEADS
need_multiple HEADS TP
((TP % KV_HEADS == 0)) || need_multiple KV_HEADS TP
need_multiple HIDDEN "2*HEADS" # rotary embedding turns pairs of a head's elements
((CP == 1)) || need_multiple SEQ_LEN "2*CP"
((TP == 1)) || need_multiple SEQ_LEN "TP*CP" # sequence parallelism
if ((gpus > 0 && NPROC > gpus)) && [[ "$BACKEND" == nccl ]]; then
    refuse "NPROC=$NPROC" "at most the $gpus GPUs of this machine" \
        "lower TP, PP or CP, or have processes share a GPU with BACKEND=gloo"
fi

data="$("$PYTHON" "$here/prepare_text.py" --output "$OUT/data" --min-tokens $((SEQ_LEN + 1)) \
    --max-bytes "$MAX_BYTES" \
    ${DATA:+--input "$DATA"})"

args=(
    --context-parallel-impl "$IMPL"
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --num-layers "$LAYERS" --hidden-size "$HIDDEN"
    --num-attention-heads "$HEADS" --group-query-attention --num-query-groups "$KV_HEADS"
    --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0
    --seq-length "$SEQ_LEN" --max-position-embeddings "$SEQ_LEN"
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR" --lr-decay-style cosine --lr-warmup-iters $((TRAIN_ITERS / 20)) --min-lr 6e-5
    --clip-grad 1.0 --weight-decay 0.1
    --calculate-per-token-loss --no-create-attention-mask-in-dataloader
    --data-path "$data" --data-cache-path "$OUT/data/cache" --split 100,0,0
    --tokenizer-type NullTokenizer --vocab-size 257
    --eval-iters 0 --eval-interval "$((TRAIN_ITERS + 1))"
    --log-interval 5
    --num-workers 1
)
((PACKED == 0)) || args+=(--dataloader-inter-document-masking)
((TP == 1)) || args+=(--sequence-parallel)
if ((gpus > 0)); then
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    args+=(--bf16 --distributed-backend "$BACKEND")
    [[ "$BACKEND" != gloo || "$IMPL" != splitkv ]] || args+=(--splitkv-transport gloo)
    ((has_te)) || args+=(--transformer-impl local --no-persist-layer-norm
        --no-masked-softmax-fusion --no-rope-fusion)
    # The output layer is Megatron's own beside Transformer Engine too, and its fusion is of apex.
    ((has_apex)) || args+=(--no-gradient-accumulation-fusion)
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the launcher shares the cores out; see its line
exec "$PYTHON" -m torch.distributed.run --standalone \
    --nproc-per-node "$NPROC" -m megatron_splitkv.launch "$here/pretrain_gpt.py" "${args[@]}" "$@"
