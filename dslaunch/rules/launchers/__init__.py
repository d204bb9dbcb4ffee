"""Rules about what starts the ranks: DeepSpeed's launcher, torchrun, mpirun, and their hosts and environment."""
