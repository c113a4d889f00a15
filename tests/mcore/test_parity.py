"""Through Megatron's loop: losses and every gradient equal a run without context parallelism.

The reference is Megatron itself on one context-parallel rank: its own `DotProductAttention`,
causal, or for packed documents with an explicit block-diagonal mask (`--reset-attention-mask`).
Where Megatron has no such run (multi-latent attention without transformer-engine; documents beside
virtual pipeline stages or multi-token prediction) it is Split-KV on one rank, which the other cases
tie to Megatron.

With two query groups keys travel; runs whose queries do ask for it.

Gradients are compared and not only losses: a wrong rotary slice moves a toy loss in its sixth
digit and gradients by a thousandth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mcore.jobs import Result, train

# fp32 sums of a few hundred terms in another order give about 2e-7; a fault starts near 1e-4.
GRADIENT_REL_L2 = 1e-5
LOSS_REL = 1e-5

PACKED = "--dataloader-inter-document-masking"
GQA = "--group-query-attention --num-query-groups 2"
BLOCK_MASK = "--reset-position-ids --reset-attention-mask"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --micro-batch-size 1"
VPP2 = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
PP4 = "--pipeline-model-parallel-size 4 --num-layers 4 --micro-batch-size 1"
MLA = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --rope-type rope --qk-layernorm"
)
MOE = (  # every token goes to all experts: a rounding cannot send it elsewhere
    "--num-experts 4 --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
VALIDATION = "--split 70,30,0 --eval-interval 2 --eval-iters 1"
QUERIES = "--splitkv-route queries"
MTP = "--mtp-num-layers 2"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run and its reference.

    Attributes:
        cp: context-parallel ranks of the run; the reference has one.
        others: tensor, pipeline and data ranks of the run beside them.
        model: arguments of both.
        heads: arguments of both, about attention heads.
        is_per_token_loss: of both, see `jobs.train`.
        run: arguments of the run only.
        reference: arguments of the reference only.
        reference_impl: implementation of the reference.
        reference_others: its ranks; data-parallel runs have a reference without.
    """

    cp: int
    others: int = 1
    model: str = ""
    heads: str = GQA
    is_per_token_loss: bool = True
    run: str = PACKED
    reference: str = BLOCK_MASK
    reference_impl: str = "megatron"
    reference_others: int | None = None


def unpacked(**settings: object) -> Case:
    """A case whose sequences are one document each."""
    return Case(run="", reference="", **settings)  # pyright: ignore[reportArgumentType]


def against_one_rank(**settings: object) -> Case:
    """A packed case whose reference is Split-KV on one rank."""
    return Case(reference=PACKED, reference_impl="splitkv", **settings)  # pyright: ignore[reportArgumentType]


CASES = {
    "cp2": unpacked(cp=2),
    "cp2-mean-of-rank-means": unpacked(cp=2, is_per_token_loss=False),
    "cp3": unpacked(cp=3),
    "cp4": unpacked(cp=4),
    "cp2-packed": Case(cp=2),
    "cp3-packed": Case(cp=3),
    "cp4-packed": Case(cp=4),
    "cp2-recompute-full": Case(
        cp=2,
        run=f"{PACKED} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "cp2-recompute-attention": Case(
        cp=2, run=f"{PACKED} --recompute-granularity selective --recompute-modules core_attn"
    ),
    "cp2-keep-queries": Case(cp=2, run=f"{PACKED} --splitkv-keep-queries {QUERIES}"),
    "cp2-keep-keys": Case(cp=2, run=f"{PACKED} --splitkv-keep-queries"),
    "cp3-packed-queries": Case(cp=3, run=f"{PACKED} {QUERIES}"),
    "cp2-tp2-sp-queries": Case(cp=2, others=2, model=TP2, run=f"{PACKED} {QUERIES}"),
    "cp2-dp2": Case(
        cp=2, others=2, reference_others=1, run=f"{PACKED} --use-distributed-optimizer"
    ),
    # Masked labels leave ranks with unequal numbers of loss tokens, in training and validation.
    "cp4-masked-labels": Case(cp=4, model=f"--eod-mask-loss {VALIDATION}"),
    "cp2-dp2-masked-labels": Case(
        cp=2, others=2, reference_others=1, model=f"--eod-mask-loss {VALIDATION}"
    ),
    "cp2-tp2-sp": Case(cp=2, others=2, model=TP2),
    "cp2-pp2": Case(cp=2, others=2, model=PP2),
    "cp2-pp2-vpp2": against_one_rank(cp=2, others=2, model=VPP2),
    "cp2-pp4": against_one_rank(cp=2, others=4, model=PP4),
    "cp2-mla": unpacked(cp=2, model=MLA, heads="", reference_impl="splitkv"),
    "cp2-mla-packed": against_one_rank(cp=2, model=MLA, heads=""),
    "cp2-moe-packed": Case(cp=2, model=MOE),
    "cp2-ep2": Case(cp=2, model=f"{MOE} --expert-model-parallel-size 2", reference_others=2),
    "cp2-mtp": unpacked(cp=2, model=MTP),
    "cp2-mtp-packed": against_one_rank(cp=2, model=MTP),
    "cp2-window": unpacked(cp=2, model="--window-size 31,0"),
    "cp2-window-and-full-layers": unpacked(
        cp=2, model="--window-size 31,0 --window-attn-skip-freq 2"
    ),
    "cp2-learnable-sink": unpacked(cp=2, model="--softmax-type learnable"),
    "cp2-learned-positions": Case(cp=2, model="--position-embedding-type learned_absolute"),
}


@pytest.fixture(scope="module")
def references(
    tmp_path_factory: pytest.TempPathFactory, text_data: Path
) -> Callable[[Case], Result]:
    """Runs each distinct reference once."""
    results: dict[tuple[str, str, int, bool], Result] = {}

    def run(case: Case) -> Result:
        extra = f"{case.heads} {case.model} {case.reference}"
        others = case.reference_others or case.others
        key = (case.reference_impl, extra, others, case.is_per_token_loss)
        if key not in results:
            folder = tmp_path_factory.mktemp("reference")
            results[key] = train(
                folder,
                text_data,
                extra,
                impl=case.reference_impl,
                num_processes=others,
                is_per_token_loss=case.is_per_token_loss,
            )
        return results[key]

    return run


@pytest.mark.timeout(250)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_losses_and_gradients_equal_a_run_without_context_parallelism(
    case: Case, references: Callable[[Case], Result], tmp_path: Path, text_data: Path
) -> None:
    expected = references(case)
    got = train(
        tmp_path,
        text_data,
        f"{case.heads} {case.model} {case.run}",
        cp=case.cp,
        num_processes=case.cp * case.others,
        is_per_token_loss=case.is_per_token_loss,
    )
    assert got.losses.keys() == expected.losses.keys()
    for name, losses in expected.losses.items():
        assert got.losses[name] == pytest.approx(losses, rel=LOSS_REL), name
    gradients, reference = got.gradients(), expected.gradients()
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error <= GRADIENT_REL_L2, f"{name}: relative L2 error {error:.2e}"
