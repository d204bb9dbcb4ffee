"""Rules about accelerate: its configuration, and command lines of `accelerate launch`."""
