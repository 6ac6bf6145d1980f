"""Whether the ranks hang: samples of /proc go in, verdicts come out, for this host and for the job.

The rules are pure (``detector`` for one host, ``job_detector`` for all); ``monitor`` samples the ranks and runs them.
Nothing here waits for a rank, stops one or changes one, and the work that it causes is bounded.
"""
