"""What outlives an attempt: pins, the removal of jobs, steps that are passed over.

The controller's machine calls it, for people's verbs and for jobs that are over.

    over --job_ttl_s--> storage is checked --all there--> removed
                               '--something is missing--> kept, and written or checked again
"""
