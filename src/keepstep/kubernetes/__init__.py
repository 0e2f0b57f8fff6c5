"""``keepstep operator``: a controller for Kubernetes that makes a training job's pods and tells of bad nodes.

What is to be done is decided without any I/O (``job_plan.reconcile``, ``node_remedies``, ``lease_election``, and
``watched`` for pods that others make); ``operator_program`` and ``cluster_api`` do it. Nothing here is imported by what
runs in a pod of a job.
"""
