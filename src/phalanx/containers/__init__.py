"""Containers: ranks and agents inside an Apptainer or Singularity image, everything else outside."""
