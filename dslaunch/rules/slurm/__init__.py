"""Rules about batch jobs: what sbatch and srun make of their options, and what of it the ranks see."""
