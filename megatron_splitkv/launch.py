"""`python -m megatron_splitkv.launch SCRIPT ARGS`: a Megatron training script with Split-KV."""

from megatron_splitkv.mcore.launch import run

if __name__ == "__main__":
    run()
