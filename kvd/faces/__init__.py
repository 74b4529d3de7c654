"""The APIs that clients already speak: routes, names, shapes and statuses, and nothing else."""
