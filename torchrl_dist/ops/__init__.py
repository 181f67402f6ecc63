"""Tools to use before, during and after a job: check the machine, write the job's script, watch the
job."""
