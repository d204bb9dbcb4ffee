"""Rules about the Hugging Face Trainer and TRL's trainers: their arguments, against the DeepSpeed JSON."""
