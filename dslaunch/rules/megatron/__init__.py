"""Rules about command lines of Megatron-LM, of its forks, and of Megatron-DeepSpeed."""
