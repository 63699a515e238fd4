"""From a plan to the text of an sbatch script: pure, so that a preview is what would be submitted."""
