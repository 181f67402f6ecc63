"""Tools for before, during and after a job: check the machine, write its script, watch it."""
