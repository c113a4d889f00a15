"""The only room that knows Megatron: attention module, hooks, arguments, launcher, CPU mode."""
