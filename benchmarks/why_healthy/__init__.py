"""Healthy trainings of several frameworks, in which ``keepstep why`` and a run's verdicts must name no failure."""
